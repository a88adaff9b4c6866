"""`quadriga keygen`: keys for a public socket that other machines reach."""

import argparse
from pathlib import Path

NAME = "keygen"
HELP = "make keys for a server and for its clients; see docs/security.md"


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the command."""
    parser.add_argument("directory", type=Path, help="the server's keys: its --curve-dir")
    parser.add_argument("clients", nargs="*", metavar="NAME", help="make keys for this client")


def run(arguments: argparse.Namespace) -> None:
    """Make keys and print what to do with them."""
    from quadriga.wire import curve

    directory: Path = arguments.directory
    if curve.make_server_keys(directory):
        start = f"start it with --curve-dir {directory}"
        print(f"the server's keys are in {directory}: {start}", flush=True)
    for name in arguments.clients:
        hand_out = curve.make_client_keys(directory, name)
        print(
            f"give {hand_out} to {name} over a confidential channel;"
            f" remove {directory / curve.ALLOWED / name}.key to revoke it",
            flush=True,
        )
