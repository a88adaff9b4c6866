"""Text, JSON and plots of a run."""
