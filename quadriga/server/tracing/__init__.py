"""Traces of requests: W3C Trace Context, their export, OTLP, and Chrome's trace format."""
