"""Measurements on a GPU, one command each."""
