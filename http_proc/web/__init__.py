"""Adapters to HTTP: endpoints, bodies of requests, middlewares, and resumable streams."""
