"""Sockets, keys, addresses and the messages between the processes."""
