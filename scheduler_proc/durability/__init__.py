"""Recovery from crashes of a process: the journal, and the outbox to the detokenizer."""
