"""Adapters to HTTP: endpoints, requests and their answers, middlewares, resumable streams."""
