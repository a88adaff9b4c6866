"""Compare Quadriga with other servers: `python -m bench.peers llama-cpp --workload W2`.

Installs each peer into an environment of its own in the cache, starts it and Quadriga, sends both
the same load in turns, and prints a markdown table of figures and ratios. `--all` measures every
peer. Exit codes: 0 measured, 1 a workload could not be measured, 2 bad flags.
"""

import argparse
import asyncio
import shlex
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from bench.models.files import Weights
from bench.peers.comparison import NotMeasured, Outcome, Settings, contest
from bench.peers.peer import WORKLOADS, Peer, PeerWorkload
from bench.peers.recipes import PEERS
from bench.peers.table import append, read, table
from bench.serving import run_until_signal
from quadriga.errors import ConfigError, QuadrigaError

EXIT_OK, EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED = 0, 1, 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run the comparison of a command line, and return the exit code."""
    arguments = _parser().parse_args(argv)
    names = list(PEERS) if arguments.all else arguments.peers
    try:
        if not names:
            outcomes = read(arguments.results) if arguments.results else []
            if not outcomes:
                raise ConfigError("name a peer, or give --all, or --results to print")
            print(table(outcomes))
            return EXIT_OK
        return run_until_signal(_compare(names, arguments))
    except ConfigError as error:
        print(f"bench.peers: {error}", file=sys.stderr)
        return EXIT_USAGE
    except (asyncio.CancelledError, KeyboardInterrupt):
        print("bench.peers: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED


async def _compare(names: Sequence[str], arguments: argparse.Namespace) -> int:
    """Compare with each peer in turn; a peer that cannot be measured does not end the command."""
    settings = Settings(
        over=arguments.ours_over,
        own_flags=tuple(shlex.split(arguments.ours_flags)),
        warmup_runs=arguments.warmup_runs,
        repeat_runs=arguments.repeat_runs,
        logs=arguments.logs or Path(tempfile.mkdtemp(prefix="bench-peers-")),
    )
    settings.logs.mkdir(parents=True, exist_ok=True)
    print(f"logs of the servers: {settings.logs}", file=sys.stderr)
    workloads = [WORKLOADS[name] for name in arguments.workload or WORKLOADS]
    measured: list[Outcome] = []
    left_out: list[str] = []
    for name in names:
        try:
            await _measure(PEERS[name], workloads, arguments, settings, measured, left_out)
        except QuadrigaError as error:
            left_out.append(f"{name}: not measured: {error}")
            print(left_out[-1], file=sys.stderr)
    print(
        "\n".join([table(measured), "", f"Ours over {settings.over}.", *map(_first_line, left_out)])
    )
    return EXIT_FAILED if left_out else EXIT_OK


async def _measure(
    peer: Peer,
    workloads: Sequence[PeerWorkload],
    arguments: argparse.Namespace,
    settings: Settings,
    measured: list[Outcome],
    left_out: list[str],
) -> None:
    """Add the outcomes of one peer to the lists, and to the file of results."""
    async for outcome in contest(peer, arguments.weights, workloads, settings):
        if isinstance(outcome, NotMeasured):
            left_out.append(str(outcome))
            print(outcome, file=sys.stderr)
        else:
            measured.append(outcome)
            if arguments.results:
                append(arguments.results, [outcome])


def _first_line(text: str) -> str:
    """Return the first line; the rest is the end of a log, which has been printed already."""
    return text.partition("\n")[0]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m bench.peers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="workloads:\n" + "\n".join(f"  {workload}" for workload in WORKLOADS.values()),
    )
    add = parser.add_argument
    add("peers", nargs="*", choices=[[], *PEERS], metavar="PEER", help=", ".join(PEERS))
    add("--all", action="store_true", help="every peer")
    add("--workload", nargs="+", choices=list(WORKLOADS), help="(default: all)")
    add("--weights", choices=get_args(Weights), default="bf16", help="(default: bf16)")
    add("--warmup-runs", type=int, default=1, help="unmeasured runs of each side (default: 1)")
    add(
        "--repeat-runs",
        type=int,
        default=3,
        help="measured runs of each side, in turns (default: 3)",
    )
    add(
        "--ours-over",
        choices=("zmq", "openai"),
        default="zmq",
        help="measure Quadriga over its own protocol, or through its gateway (default: zmq)",
    )
    add(
        "--ours-flags",
        default="",
        metavar="FLAGS",
        help='further flags of our server: "--page-size 32"',
    )
    add(
        "--results",
        type=Path,
        metavar="FILE",
        help="append the results to a file; without a peer, print the results in it",
    )
    add("--logs", type=Path, metavar="DIRECTORY", help="directory of the servers' logs")
    return parser


if __name__ == "__main__":
    sys.exit(main())
