"""Starts the worker: `python -m worker_proc`."""

from worker_proc.main import main

main()
