"""The bench client and its parts. No torch."""
