"""The tokenizer process: public socket, checks, chat template, encoding, delivery to clients."""
