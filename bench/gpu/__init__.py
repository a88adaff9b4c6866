"""Measurements on a card, one command each."""
