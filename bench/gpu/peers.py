"""Compare with other servers on the same GPU: both serve, and take turns with the load, A B A B.

    python -m bench.gpu.peers --model gpu-files/gpt2 --vllm /opt/vllm --sglang /opt/sglang

The value of a server's flag is the virtual environment that has it; without the flag, that of this
Python. All load the same random weights, drawn once from the model's config.json. Two servers share
the GPU's memory. Prints medians of neighbouring runs. A server that is not installed is named and
left out. Exit codes: 0 measured, or nothing to compare with; 1 a server failed; 2 bad flags.
"""

import argparse
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.cli.command import EXIT_FAILED, EXIT_OK, command_parser, run_command, run_until_signal
from bench.peers.comparison import FIGURES, NotMeasured, Outcome, Settings, contest
from bench.peers.recipes import HOST, OFFLINE, TRANSFORMERS, Peer, PeerWorkload, Start
from bench.report.table import FigureRow, add_json_flag, show
from quadriga.errors import ConfigError

# Of all memory for weights and keys, by each of two servers.
MEMORY_SHARE = 0.4


@dataclass(frozen=True, slots=True)
class GpuPeer:
    """Another server in a virtual environment that has it.

    Attributes:
        package: its presence in the environment says that the server can be started.
        program: in the environment.
        flags: returns the command line behind the program.
        base: gives what differs in its requests.
    """

    name: str
    package: str
    program: str
    flags: Callable[[Path, int, str], list[str]]
    base: Peer | None = None

    def found_in(self, home: Path) -> bool:
        """Return whether an environment has the server."""
        return any(home.glob(f"lib/python*/site-packages/{self.package}/__init__.py"))

    def peer(self, home: Path, directory: Path, device: str) -> Peer:
        """Return the server as bench.peers measures it."""
        program = home / "bin" / self.program

        def command(start: Start) -> list[str]:
            return [str(program), *self.flags(directory, start.port, device)]

        if self.base is None:
            return Peer(self.name, lambda: program, command, ("bf16",), OFFLINE)
        return Peer(
            self.name,
            lambda: program,
            command,
            ("bf16",),
            OFFLINE,
            self.base.extra_body,
            self.base.prompt_form,
        )


def _vllm(directory: Path, port: int, _device: str) -> list[str]:
    return [
        *("serve", str(directory), "--host", HOST, "--port", str(port), "--dtype", "bfloat16"),
        *("--gpu-memory-utilization", str(MEMORY_SHARE), "--disable-log-stats"),
    ]


def _sglang(directory: Path, port: int, device: str) -> list[str]:
    return [
        *("-m", "sglang.launch_server", "--model-path", str(directory), "--host", HOST),
        *("--port", str(port), "--dtype", "bfloat16", "--device", device),
        *("--mem-fraction-static", str(MEMORY_SHARE)),
    ]


def _transformers(directory: Path, port: int, device: str) -> list[str]:
    return [
        *("serve", str(directory), "--host", HOST, "--port", str(port), "--device", device),
        *("--dtype", "bfloat16", "--continuous-batching"),
    ]


PEERS = (
    GpuPeer("vllm", "vllm", "vllm", _vllm),
    GpuPeer("sglang", "sglang", "python", _sglang),
    # Its server needs fastapi, which transformers does not bring along.
    GpuPeer("transformers", "fastapi", "transformers", _transformers, TRANSFORMERS),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the comparison of a command line, and return the exit code."""
    parser = command_parser("bench.gpu.peers", __doc__)
    parser.add_argument(
        "--model",
        type=Path,
        required=True,
        metavar="DIRECTORY",
        help="config.json and a tokenizer, as bench.gpu.prepare writes them",
    )
    parser.add_argument("--device", default="cuda", help="(default: cuda)")
    for peer in PEERS:
        parser.add_argument(
            f"--{peer.name}",
            type=Path,
            default=Path(sys.prefix),
            metavar="DIRECTORY",
            help="virtual environment with it (default: this one)",
        )
    for name, value in (
        ("input-len", 128),
        ("output-len", 128),
        ("concurrency", 64),
        ("num-requests", 256),
        ("warmup-runs", 1),
        ("repeat-runs", 3),
    ):
        parser.add_argument(
            f"--{name}", type=int, default=value, metavar="N", help=f"(default: {value})"
        )
    add_json_flag(parser)
    arguments = parser.parse_args(argv)
    return run_command("bench.gpu.peers", lambda: _main(arguments))


def _main(arguments: argparse.Namespace) -> int:
    if not (arguments.model / "config.json").is_file():
        raise ConfigError(
            f"--model {arguments.model} has no config.json: give a directory that"
            " bench.gpu.prepare has written"
        )
    found: list[tuple[GpuPeer, Path]] = []
    for peer in PEERS:
        home: Path = getattr(arguments, peer.name)
        if peer.found_in(home):
            found.append((peer, home))
        else:
            print(f"{peer.name} is left out: {home} has no package {peer.package}")
    if not found:
        print("there is nothing to compare with")
        return EXIT_OK
    from bench.gpu.prepare import write_weights

    with tempfile.TemporaryDirectory(prefix="bench-gpu-peers-") as scratch:
        directory = Path(scratch) / "model"
        write_weights(arguments.model, directory)
        peers = [peer.peer(home, directory, arguments.device) for peer, home in found]
        return run_until_signal(_compare(peers, directory, Path(scratch), arguments))


async def _compare(
    peers: Sequence[Peer], directory: Path, logs: Path, arguments: argparse.Namespace
) -> int:
    workload = PeerWorkload(
        directory.name,
        "gpt2",
        arguments.input_len,
        arguments.output_len,
        arguments.concurrency,
        arguments.num_requests,
    )
    own_flags = (
        "--device",
        arguments.device,
        "--mem-fraction-static",
        str(MEMORY_SHARE),
        "--max-batch-size",
        str(arguments.concurrency),
    )
    settings = Settings(
        "openai",
        own_flags,
        arguments.warmup_runs,
        arguments.repeat_runs,
        logs,
        directory_of=lambda _: directory,
    )
    rows: list[FigureRow] = []
    code = EXIT_OK
    for peer in peers:
        async for found in contest(peer, "bf16", [workload], settings):
            if isinstance(found, NotMeasured):
                print(found)
                code = EXIT_FAILED
            else:
                rows.append(figures_of(found))
    if rows:
        show(f"ours and others on {arguments.device}, both through HTTP", rows, arguments.json)
    return code


def figures_of(outcome: Outcome) -> FigureRow:
    """Return the medians of both sides."""
    row: dict[str, str | int | float | None] = {"peer": outcome.peer}
    for title, _, figure in FIGURES:
        for side, summaries in (("ours", outcome.ours), ("theirs", outcome.theirs)):
            values = [value for one in summaries if (value := figure(one)) is not None]
            row[f"{title}, {side}"] = statistics.median(values) if values else None
    return row


if __name__ == "__main__":
    sys.exit(main())
