"""The HTTP APIs that generate text: one folder or file for each, on the same chat layer."""
