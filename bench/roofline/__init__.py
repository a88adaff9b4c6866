"""Steps of the worker against the roofline: `python -m bench.roofline`."""
