"""KV pages beyond the pool: which are stored, which are loaded, and who waits for them."""
