"""`quadriga top`: what a server does now, on a terminal."""
