"""Files and batches of the gateway."""
