"""Copy values that a model writes in JSON, or in a similar syntax, as JSON."""
