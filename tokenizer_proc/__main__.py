"""Entry point of `python -m tokenizer_proc`."""

from tokenizer_proc.main import main

main()
