"""OpenAI's /v1/conversations: items that responses continue and add to."""
