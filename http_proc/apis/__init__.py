"""The APIs that generate text, a file each, and the endpoints beside generation."""
