"""The live feed at the client: the subscription, and its messages as JSON."""
