"""Grammars of structured answers: JSON schemas, structural tags, and the library that runs them."""
