"""Start, supervision and restart of the server's processes, for launcher.py."""
