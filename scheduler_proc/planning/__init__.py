"""The rules of the core: limits, admission and quarantine."""
