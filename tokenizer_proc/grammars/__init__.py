"""Validate grammars in a process of their own before a request is submitted."""
