"""The request log and the metrics of HTTP requests."""
