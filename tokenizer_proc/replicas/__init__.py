"""The replicas of the server: which one has a request, how it moves, what they answer together."""
