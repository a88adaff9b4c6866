"""A call and its answer, without HTTP: the requests behind it, streams, what is observed."""
