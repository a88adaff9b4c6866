"""The built-in models: what they are called, and how they are fetched from a package index."""
