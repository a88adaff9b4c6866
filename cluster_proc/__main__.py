"""Entry point of `python -m cluster_proc`."""

from cluster_proc.main import main

main()
