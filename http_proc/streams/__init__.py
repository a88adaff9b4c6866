"""Streams that outlive their connections, and are resumed by others."""
