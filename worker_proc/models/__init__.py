"""Model architectures, one readable file each."""
