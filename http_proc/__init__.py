"""The OpenAI-compatible web gateway: a client of the server like any other."""
