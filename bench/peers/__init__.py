"""Our server against others: each in its own environment, under the same load, taking turns."""
