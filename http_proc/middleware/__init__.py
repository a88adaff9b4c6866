"""Around every request: API keys, CORS, request ids, error bodies and slow clients."""
