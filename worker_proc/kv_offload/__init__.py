"""KV pages beyond the pool: in the computer's memory, and on its disk."""
