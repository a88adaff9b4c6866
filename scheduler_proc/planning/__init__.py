"""What the core decides by: admission, limits and quarantine."""
