"""Several replicas behind one frontend: which one gets a request, and what it has of it."""
