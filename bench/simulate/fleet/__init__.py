"""Replicas of a simulation: the router, losses, moves, and a number that follows the load."""
