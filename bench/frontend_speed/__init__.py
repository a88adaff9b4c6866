"""Tokens per second of replicas whose workers compute nothing, and the CPU time of all else."""
