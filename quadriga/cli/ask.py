"""`quadriga ask "..."`: one question, one answer."""

import argparse

from quadriga.cli.flags import add_sampling, add_server, sampling
from quadriga.client import Client

NAME = "ask"
HELP = "ask a running server, and print the answer as it comes"


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the command."""
    parser.add_argument("prompt", nargs="+", help="the question; several words become one text")
    parser.add_argument("--plain", action="store_true", help="continue the text; no chat template")
    add_server(parser)
    add_sampling(parser, temperature=0.0)


def run(arguments: argparse.Namespace) -> None:
    """Print the answer as it comes."""
    text = " ".join(arguments.prompt)
    prompt = text if arguments.plain else [{"role": "user", "content": text}]
    with Client(arguments.endpoint, curve_dir=arguments.curve_dir) as client:
        for chunk in client.stream(prompt, sampling(arguments)):
            print(chunk.text, end="", flush=True)
    print()
