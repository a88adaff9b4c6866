"""The APIs that generate text, one to three files each, and the endpoints beside generation."""
