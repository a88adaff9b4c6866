"""Attention over pages: a contract, and a backend a file."""
