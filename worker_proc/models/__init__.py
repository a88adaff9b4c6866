"""Model architectures, one file each, and the operations that they are written in."""
