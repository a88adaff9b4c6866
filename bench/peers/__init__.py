"""Compare Quadriga with other servers: each in its own environment, taking turns."""
