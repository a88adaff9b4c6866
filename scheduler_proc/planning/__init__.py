"""Decide which requests run in the next step: order, slots, pages, prompts, costs, speculation."""
