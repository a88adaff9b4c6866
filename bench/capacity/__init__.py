"""The request rate that a machine serves within latency limits: `python -m bench.capacity`."""
