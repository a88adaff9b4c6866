"""Build the runner, size the KV pool and tune the prefill when the worker starts."""
