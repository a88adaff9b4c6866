"""Traces of requests: W3C Trace Context, OTLP and its exporter, and Chrome's trace format."""
