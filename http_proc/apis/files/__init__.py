"""OpenAI's /v1/files: files that a client uploads, and that batches write."""
