"""Statistics, server info and the status line."""
