"""Run a model in several processes by tensor parallelism."""
