"""Latencies, throughput and percentiles of a run."""
