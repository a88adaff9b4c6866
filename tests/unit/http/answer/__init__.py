"""Tests of the parser of answers."""
