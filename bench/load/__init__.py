"""What the bench client sends: datasets, traces and synthetic workloads."""
