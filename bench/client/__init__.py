"""Clients that send the load, and the servers that the bench starts."""
