"""Devices, memory, transfers and clocks of the worker."""
