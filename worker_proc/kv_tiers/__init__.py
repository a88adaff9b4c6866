"""KV pages beyond the pool: in host memory, and on disk."""
