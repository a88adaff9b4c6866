"""Command line flags of the server and its processes, as dataclasses.

`python -m quadriga.config --markdown` prints the table of docs/configuration.md.
"""
