"""Server-sent events."""
