"""Command-line flags of the bench client."""
