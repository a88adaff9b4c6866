"""The bodies of requests and answers, and their translation to the client library."""
