"""Compare Quadriga with other servers: `python -m bench.peers llama-cpp --workload W2`.

Installs each peer into an environment of its own in the cache, starts it and Quadriga, sends both
the same load in turns, and prints a markdown table of figures and ratios. `--all` measures every
peer. Exit codes: 0 measured, 1 a workload could not be measured, 2 bad flags.

    python -m bench.peers --device cuda --model gpu-files/gpt2 --home vllm=/opt/vllm

installs nothing: it compares with vLLM, SGLang and `transformers serve` on a device, as far as
virtual environments have them (--home; by default that of this Python). All serve the same random
weights, drawn once from the model's config.json, and two servers share the memory.
"""

import argparse
import shlex
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import get_args

from bench.cli.command import EXIT_FAILED, EXIT_OK, command_parser, run_command, run_until_signal
from bench.peers.comparison import NotMeasured, Outcome, Settings, append, contest, read, table
from bench.peers.models import Weights, write_random_weights
from bench.peers.recipes import (
    MEMORY_SHARE,
    ON_DEVICE,
    PEERS,
    WORKLOADS,
    Peer,
    PeerWorkload,
    is_in,
    peer_on,
    workloads_of,
)
from quadriga.errors import ConfigError, QuadrigaError


def main(argv: Sequence[str] | None = None) -> int:
    """Run the comparison of a command line, and return the exit code."""
    arguments = _parser().parse_args(argv)
    return run_command("bench.peers", lambda: _main(arguments))


def _main(arguments: argparse.Namespace) -> int:
    if arguments.device:
        return _on_device(arguments)
    names = list(PEERS) if arguments.all else arguments.peers
    if names:
        return run_until_signal(_compare_installed(names, arguments))
    outcomes = read(arguments.results) if arguments.results else []
    if not outcomes:
        raise ConfigError("name a peer, or give --all, or --results to print")
    print(table(outcomes))
    return EXIT_OK


def _on_device(arguments: argparse.Namespace) -> int:
    """Compare with the servers of environments that are there."""
    model: Path | None = arguments.model
    if model is None or not (model / "config.json").is_file():
        raise ConfigError(
            f"--model {model} has no config.json: give a directory that bench.gpu.prepare has"
            " written"
        )
    homes = {name: Path(home) for name, _, home in (h.partition("=") for h in arguments.home)}
    found: dict[str, Path] = {}
    for name in arguments.peers or ON_DEVICE:
        home = homes.get(name, Path(sys.prefix))
        if name in ON_DEVICE and is_in(home, name):
            found[name] = home
        else:
            print(f"{name} is left out: {home} has no server of this name")
    if not found:
        print("there is nothing to compare with")
        return EXIT_OK
    with tempfile.TemporaryDirectory(prefix="bench-peers-") as scratch:
        directory = Path(scratch) / "model"
        write_random_weights(model, directory)
        peers = [peer_on(arguments.device, name, home, directory) for name, home in found.items()]
        workload = PeerWorkload(model.name, "gpt2", *arguments.load)
        own_flags = (
            *("--device", arguments.device, "--mem-fraction-static", str(MEMORY_SHARE)),
            *("--max-batch-size", str(workload.concurrency)),
        )
        settings = replace(
            _settings(arguments), over="openai", own_flags=own_flags,
            directory_of=lambda _: directory,
        )  # fmt: skip
        return run_until_signal(_compare(peers, [workload], settings, arguments))


def _settings(arguments: argparse.Namespace) -> Settings:
    return Settings(
        over=arguments.ours_over,
        own_flags=tuple(shlex.split(arguments.ours_flags)),
        warmup_runs=arguments.warmup_runs,
        repeat_runs=arguments.repeat_runs,
        logs=arguments.logs or Path(tempfile.mkdtemp(prefix="bench-peers-")),
        peer_flags=tuple(shlex.split(arguments.peer_flags)),
    )


async def _compare_installed(names: Sequence[str], arguments: argparse.Namespace) -> int:
    """Install each peer, and compare with it."""
    if wrong := set(names) - set(PEERS):
        raise ConfigError(f"{', '.join(wrong)} is measured with --device: add it")
    settings = _settings(arguments)
    if settings.peer_flags and len(names) > 1:
        raise ConfigError(
            f"--peer-flags {arguments.peer_flags!r} are the flags of one server, and"
            f" {', '.join(names)} are {len(names)}: name one"
        )
    possible = workloads_of(arguments.weights)
    if unfit := set(arguments.workload or ()) - set(possible):
        raise ConfigError(
            f"{', '.join(sorted(unfit))} has no {arguments.weights} weights; --weights"
            f" {arguments.weights} has {', '.join(possible)}"
        )
    workloads = [WORKLOADS[name] for name in arguments.workload or possible]
    return await _compare([PEERS[name] for name in names], workloads, settings, arguments)


async def _compare(
    peers: Sequence[Peer],
    workloads: Sequence[PeerWorkload],
    settings: Settings,
    arguments: argparse.Namespace,
) -> int:
    """Compare with each peer in turn; a peer that cannot be measured does not end the command."""
    settings.logs.mkdir(parents=True, exist_ok=True)
    print(f"logs of the servers: {settings.logs}", file=sys.stderr)
    measured: list[Outcome] = []
    left_out: list[str] = []

    def leave_out(reason: str) -> None:
        left_out.append(reason)
        print(reason, file=sys.stderr)

    for peer in peers:
        try:
            async for found in contest(peer, arguments.weights, workloads, settings):
                if isinstance(found, NotMeasured):
                    leave_out(str(found))
                    continue
                measured.append(found)
                if arguments.results:
                    append(arguments.results, found)
        except QuadrigaError as error:
            leave_out(f"{peer.name}: not measured: {error}")
    # Further lines of a reason are the end of a log, which has been printed already.
    reasons = [reason.partition("\n")[0] for reason in left_out]
    print("\n".join([table(measured), "", f"Ours over {settings.over}.", *reasons]))
    return EXIT_FAILED if left_out else EXIT_OK


def _parser() -> argparse.ArgumentParser:
    workloads = [f"  {workload}" for workload in WORKLOADS.values()]
    parser = command_parser("bench.peers", __doc__, "\n".join(["workloads:", *workloads]))
    add = parser.add_argument
    names = list(PEERS | ON_DEVICE)
    add("peers", nargs="*", choices=[[], *names], metavar="PEER", help=", ".join(names))
    add("--all", action="store_true", help="every peer")
    help_of_workload = "(default: all that have the weights)"
    add("--workload", nargs="+", choices=list(WORKLOADS), help=help_of_workload)
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
        "--peer-flags",
        default="",
        metavar="FLAGS",
        help="further flags of the peer's server, with --peer-flags=FLAGS: speculation, for one",
    )
    add(
        "--results",
        type=Path,
        metavar="FILE",
        help="append the results to a file; without a peer, print the results in it",
    )
    add("--device", default="", help="cuda, or cpu: of all servers; nothing is installed")
    add("--model", type=Path, metavar="DIRECTORY", help="with --device: as of bench.gpu.prepare")
    add(
        "--home",
        action="append",
        default=[],
        metavar="PEER=DIRECTORY",
        help="with --device: virtual environment of a peer",
    )
    add(
        "--load",
        type=int,
        nargs=4,
        default=(128, 128, 64, 256),
        metavar=("IN", "OUT", "STREAMS", "REQUESTS"),
        help="with --device: tokens, and how many at a time and in all (default: 128 128 64 256)",
    )
    add("--logs", type=Path, metavar="DIRECTORY", help="directory of the servers' logs")
    return parser


if __name__ == "__main__":
    sys.exit(main())
