"""Parse a model's answer, while it is generated, into text, reasoning and tool calls."""
