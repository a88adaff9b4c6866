"""The OpenAI-compatible web gateway: a client of the ring like any other."""
