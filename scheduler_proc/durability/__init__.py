"""What survives the death of a process: the journal and the outbox to the detokenizer."""
