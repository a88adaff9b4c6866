"""Requests, batches and the pages of the KV pool."""
