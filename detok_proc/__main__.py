"""Entry point of `python -m detok_proc`."""

from detok_proc.main import main

main()
