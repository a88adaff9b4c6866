"""`quadriga keygen`: keys for a public socket that other machines reach."""

import argparse
import sys
from pathlib import Path

from quadriga.errors import QuadrigaError

NAME = "keygen"
HELP = "make keys for a server and for its clients; see docs/security.md"


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the command."""
    parser.add_argument("directory", type=Path, help="the server's keys: its --curve-dir")
    parser.add_argument("clients", nargs="*", metavar="NAME", help="make keys for this client")


def run(arguments: argparse.Namespace) -> int:
    """Make keys, print what to do with them, and return the exit code."""
    from quadriga.wire import curve

    directory: Path = arguments.directory
    try:
        if curve.make_server_keys(directory):
            print(f"the server's keys are in {directory}: start it with --curve-dir {directory}")
        for name in arguments.clients:
            hand_out = curve.make_client_keys(directory, name)
            print(
                f"give {hand_out} to {name} over a confidential channel;"
                f" remove {directory / curve.ALLOWED / name}.key to revoke it"
            )
    except (QuadrigaError, OSError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0
