"""How the bench client sends it, and the servers that it starts."""
