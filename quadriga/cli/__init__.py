"""What `quadriga` does at a terminal: serve, chat, ask, bench."""
