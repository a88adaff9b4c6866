"""The record of each step, and what survives a crash: the journal and the outbox of ends."""
