"""OpenAI's Responses API: input items to a chat, and parsed answers to output items and events."""
