"""Chat templates: run them safely, find what they take, and adapt chats and tools to them."""
