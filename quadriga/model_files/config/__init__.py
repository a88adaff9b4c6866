"""What a config.json says, as the worker builds models from it; without torch."""
