"""What people look at: the page at /, the live feed, what-if simulations, and the metrics."""
