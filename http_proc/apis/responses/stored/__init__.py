"""The store of responses and conversations: one SQLite file, its bounds, and what reads it."""
