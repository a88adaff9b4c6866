"""Attention over pages: what an engine is asked for, and the reference in plain torch."""
