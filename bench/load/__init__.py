"""Loads of the bench client: datasets, traces and synthetic workloads."""
