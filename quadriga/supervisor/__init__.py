"""Starts, watches and restarts the processes; used by launcher.py."""
