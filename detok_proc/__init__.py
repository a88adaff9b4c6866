"""The detokenizer process: turns the token ids of each step into text for the clients."""
