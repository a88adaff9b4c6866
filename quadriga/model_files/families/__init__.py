"""One file for each family of models: what its config.json says, without torch."""
