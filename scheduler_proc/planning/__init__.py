"""Which requests may run: limits, slots, pages, quarantine; the costs of steps, and guesses."""
