"""What if: the load of a server with other flags, beside what happened."""
