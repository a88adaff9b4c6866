"""What clients are sent: their messages, the live feed, and the traces of their requests."""
