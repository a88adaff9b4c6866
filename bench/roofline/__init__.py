"""Compare steps of the worker with the machine's roofline: `python -m bench.roofline`."""
