"""Start, supervision and restart of the server's processes, and the frame that each runs in."""
