"""Command line flags of the server and its processes, as dataclasses.

`python -m quadriga.server.config --markdown` prints the table of docs/configuration.md.
"""
