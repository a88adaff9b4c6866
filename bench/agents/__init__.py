"""Agents of several turns beside a load of other prompts: `python -m bench.agents`."""
