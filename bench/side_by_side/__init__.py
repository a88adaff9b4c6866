"""Short prompts among a long one, on real servers."""
