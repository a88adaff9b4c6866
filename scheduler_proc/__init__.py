"""The scheduler process: it owns every request and the KV pages. No torch, no text."""
