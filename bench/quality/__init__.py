"""Smaller numbers against float32: `python -m bench.quality`."""
