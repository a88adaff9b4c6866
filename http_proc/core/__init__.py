"""The gateway's state, the requests behind a web request, streams, and what is observed."""
