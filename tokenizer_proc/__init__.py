"""Encodes text, checks requests, owns the public socket."""
