"""The parser of answers: text, reasoning and tool calls, while they arrive."""
