"""The Responses API and conversations: items to a chat, answers to items, and their store."""
