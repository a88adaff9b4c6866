"""The start of a server: its phases, its time to the first token, and its CPU time."""
