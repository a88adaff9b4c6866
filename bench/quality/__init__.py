"""Compare number formats with float32: `python -m bench.quality`."""
