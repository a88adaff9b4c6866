"""Turns token ids into text, a step at a time."""
