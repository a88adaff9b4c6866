"""The frame of a process that the launcher starts, and its use of the system."""
