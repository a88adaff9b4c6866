"""Prompts: which a step computes, and how many tokens of each."""
