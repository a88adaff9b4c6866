"""Run the worker process."""

from worker_proc.main import main

main()
