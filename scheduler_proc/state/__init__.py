"""Requests, batches, and the KV pages in the pool and beyond it."""
