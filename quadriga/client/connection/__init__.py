"""The client's connection: finds a server, and finds it again after a loss."""
