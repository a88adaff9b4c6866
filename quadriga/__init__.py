"""Quadriga: the LLM server in four processes. What the processes share, and the client library."""
