"""Check a request, render its chat template and encode its prompt."""
