"""OpenAI's /v1/batches: files of requests that run while the server has room."""
