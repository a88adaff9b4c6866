"""What all APIs that generate text share: sampling, chats, tool grammars, reading of answers."""
