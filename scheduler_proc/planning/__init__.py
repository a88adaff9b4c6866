"""Decide what the next step runs: admission, batches, retraction."""
