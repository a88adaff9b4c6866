"""Owns the weights and the KV pool: runs the steps that the scheduler plans."""
