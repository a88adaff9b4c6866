"""Run the gateway: `python -m http_proc`."""

from http_proc.main import main

main()
