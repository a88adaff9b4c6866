"""What KV pages on disk save after a restart, and after a crash of the worker."""
