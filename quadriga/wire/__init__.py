"""Sockets, keys, addresses and messages of the links between processes."""
