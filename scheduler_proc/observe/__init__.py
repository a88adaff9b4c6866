"""Counters, log lines, spans, and the report to the frontend's router."""
