"""The scheduler in simulated time: `python -m bench.simulate`."""
