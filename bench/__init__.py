"""Benchmarks: the bench client, which needs no torch, and developer tools."""
