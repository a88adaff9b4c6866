"""Forecasts: when waiting requests are admitted, and when they have their first tokens."""
