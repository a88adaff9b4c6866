"""The command line flags of the server and of its processes, as dataclasses."""
