"""Request and response bodies, and their translation to the client library's types."""
