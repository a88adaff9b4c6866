"""Owns every request: waiting queue, running batch, KV pages. No torch, no text."""
