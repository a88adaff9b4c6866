"""Run the scheduler process: python -m scheduler_proc."""

from scheduler_proc.main import main

main()
