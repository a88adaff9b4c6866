"""What surrounds every handler: ids, error bodies, API keys, CORS and slow clients."""
