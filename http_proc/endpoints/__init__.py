"""The handlers of the HTTP endpoints, one module for each group of them."""
