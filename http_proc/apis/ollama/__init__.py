"""Ollama's API: /api/chat, /api/generate and the endpoints that describe the model."""
