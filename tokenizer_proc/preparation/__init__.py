"""Check a message, render its chat template and encode its prompt."""
