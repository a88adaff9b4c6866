"""Guessed tokens: where guesses come from, and which of them were right."""
