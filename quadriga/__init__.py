"""Quadriga: an LLM server in four processes. What the processes share, and the client library.

The public interface is `quadriga.client` and `quadriga.errors`.
"""

__version__ = "0.1.0"
