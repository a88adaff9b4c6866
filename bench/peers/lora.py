"""Compare streams of many adapters with those of the base: `python -m bench.peers.lora [PEER]`.

    python -m bench.peers.lora                       # Quadriga alone
    python -m bench.peers.lora llama-cpp vllm        # in turns with these servers

All servers serve SmolLM2 in bfloat16 with the same random adapters of every projection, and are
measured through their OpenAI-compatible API by the same client. In each turn a server has the base
alone, then 1, 8 and 32 adapters (--counts) that its streams name one after the other; the other
servers are stopped (SIGSTOP). Shown are medians over the turns, and shares of the base's rate of
the same server in the same turn.
"""

import argparse
import asyncio
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from bench.cli.command import EXIT_OK, command_parser, run_command, run_until_signal
from bench.client.backends import OpenAIServer
from bench.client.server import OwnServer, ServerProcess, config_of, connection, free_port, info_of
from bench.load.random_adapters import write_gguf, write_peft
from bench.peers.models import hugging_face_directory
from bench.peers.recipes import PEERS, PeerWorkload, Start
from bench.report.table import FigureRow, add_json_flag, show
from bench.turns import split_common
from quadriga.sampling.params import SamplingParams
from quadriga.server.models.resolve import resolve_model

OURS = "quadriga"
READY_TIMEOUT_S, INFO_TIMEOUT_S = 600.0, 2.0
FIRST_TOKEN = 1000  # prompts are random tokens from here on


@dataclass(slots=True)
class Side:
    """A server of the comparison.

    Attributes:
        names: the model of a request for the base and for each adapter; "": the server's model.
        bodies: further fields of a request for each.
        rates: output tokens per second of each turn, by the number of adapters.
    """

    title: str
    process: ServerProcess
    base_url: str
    names: list[str]
    bodies: list[dict[str, Any]]
    rates: dict[int, list[float]] = field(default_factory=dict)

    def address(self, adapter: int | None) -> OpenAIServer:
        """Return the server for requests of an adapter, or of the base."""
        place = 0 if adapter is None else adapter + 1
        return OpenAIServer(self.base_url, self.names[place], extra_body=self.bodies[place])


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command, and return the exit code."""
    own, server_flags = split_common(sys.argv[1:] if argv is None else argv)
    parser = command_parser("bench.peers.lora", __doc__)
    add = parser.add_argument
    add("peers", nargs="*", choices=[[], "llama-cpp", "vllm"], metavar="PEER")
    add("--counts", type=int, nargs="+", default=[1, 8, 32], metavar="N",
        help="adapters of the streams (default: 1 8 32)")  # fmt: skip
    add("--rank", type=int, default=16, metavar="R", help="(default: 16)")
    add("--streams", type=int, default=32, metavar="N", help="at one time (default: 32)")
    add("--input-len", type=int, default=128, metavar="N", help="tokens (default: 128)")
    add("--output-len", type=int, default=64, metavar="N", help="tokens (default: 64)")
    add("--turns", type=int, default=3, metavar="N", help="measured ones (default: 3)")
    add("--dtype", default="bfloat16", help="of our server's weights (default: bfloat16)")
    add_json_flag(parser)
    arguments = parser.parse_args(own)
    work = _compare(arguments, server_flags)
    return run_command("bench.peers.lora", lambda: run_until_signal(work))


async def _compare(arguments: argparse.Namespace, server_flags: Sequence[str]) -> int:
    with tempfile.TemporaryDirectory(prefix="bench-lora-") as name:
        directory = Path(name)
        model = hugging_face_directory("smollm2")
        flags = ["--model", str(model), "--dtype", arguments.dtype, *server_flags]
        config = resolve_model(config_of(flags).model).config
        sides = []
        async with AsyncExitStack() as stack:
            for title in (OURS, *arguments.peers):
                if title == OURS:
                    side = _ours(flags, config, directory, arguments)
                else:
                    side = _peer(title, config, directory, arguments)
                stack.enter_context(side.process)
                limits = INFO_TIMEOUT_S, INFO_TIMEOUT_S
                ask = partial(info_of, side.address(None), "", *limits)
                base = str((await side.process.wait_ready(ask))["model"])
                side.names = [name or base for name in side.names]
                sides.append(side)
                side.process.pause()
            for turn in range(arguments.turns + 1):
                for side in sides:
                    side.process.resume()
                    await _turn(side, arguments, turn)
                    side.process.pause()
    show(
        f"{arguments.streams} streams, {arguments.input_len} tokens in, {arguments.output_len}"
        f" out, rank {arguments.rank}",
        [_row(side, count) for side in sides for count in (0, *arguments.counts)],
        arguments.json,
    )
    return EXIT_OK


def _row(side: Side, count: int) -> FigureRow:
    pairs = zip(side.rates[count], side.rates[0], strict=True)
    return {
        "server": side.title,
        "adapters": count,
        "tok/s": statistics.median(side.rates[count]),
        "of its base": statistics.median(rate / base for rate, base in pairs),
    }


async def _turn(side: Side, arguments: argparse.Namespace, turn: int) -> None:
    """Measure the base and every number of adapters; turn 0 is not counted."""
    for count in (0, *arguments.counts):
        rate = await _rate(side, count, arguments, seed=turn)
        if turn:
            side.rates.setdefault(count, []).append(rate)
        print(f"{side.title}, turn {turn}, {count} adapters: {rate:.0f} tok/s", file=sys.stderr)


async def _rate(side: Side, count: int, arguments: argparse.Namespace, seed: int) -> float:
    """Return the output tokens per second of streams that all begin at once.

    Raises:
        RequestFailed: a stream has failed, or has another number of tokens.
    """
    words = random.Random(f"{seed} {count}")
    params = SamplingParams(temperature=0, max_new_tokens=arguments.output_len, ignore_eos=True)

    async def stream(number: int) -> None:
        address = side.address(number % count if count else None)
        prompt = [words.randrange(FIRST_TOKEN, 40_000) for _ in range(arguments.input_len)]
        async with connection(address, READY_TIMEOUT_S, "") as client:
            async for _ in client.submit(prompt, params):
                pass

    began_at = time.monotonic()
    await asyncio.gather(*(stream(number) for number in range(arguments.streams)))
    return float(arguments.streams * arguments.output_len / (time.monotonic() - began_at))


def _ours(
    flags: list[str], config: dict[str, Any], directory: Path, arguments: argparse.Namespace
) -> Side:
    port, names = free_port(), _write_peft(directory, config, arguments)
    count = str(max(arguments.counts))
    flags = [*flags, "--lora-dir", str(directory), "--max-loras", count]
    process = OwnServer(config_of(flags), directory / "ours.log", http_port=port)
    return Side(OURS, process, f"http://127.0.0.1:{port}", ["", *names], [{}] * (len(names) + 1))


def _peer(
    name: str, config: dict[str, Any], directory: Path, arguments: argparse.Namespace
) -> Side:
    peer, port, most = PEERS[name], free_port(), max(arguments.counts)
    sizes = arguments.input_len, arguments.output_len, arguments.streams, arguments.streams
    workload = PeerWorkload(name, "smollm2", *sizes)
    command = peer.command(Start(peer.install(), port, workload, "bf16"))
    if name == "vllm":
        names = _write_peft(directory, config, arguments)
        modules = [f"{adapter}={directory / adapter}" for adapter in names]
        command += ["--enable-lora", "--max-loras", str(most), "--max-lora-rank",
                    str(arguments.rank), "--lora-modules", *modules]  # fmt: skip
        names, bodies = ["", *names], [dict(peer.extra_body)] * (most + 1)
    else:
        command += ["--lora-init-without-apply"]
        for number in range(most):
            path = directory / f"{number}.gguf"
            write_gguf(path, config, number, arguments.rank)
            command += ["--lora", str(path)]
        names = [""] * (most + 1)
        chosen = [[], *([{"id": number, "scale": 1.0}] for number in range(most))]
        bodies = [{**peer.extra_body, "lora": lora} for lora in chosen]
    log = directory / f"{name}.log"
    process = ServerProcess(command, log, READY_TIMEOUT_S, peer.environment)
    return Side(name, process, f"http://127.0.0.1:{port}", names, bodies)


def _write_peft(
    directory: Path, config: dict[str, Any], arguments: argparse.Namespace
) -> list[str]:
    """Write the adapters, unless they are there, and return their names."""
    names = [f"adapter-{number}" for number in range(max(arguments.counts))]
    for number, name in enumerate(names):
        if not (directory / name).is_dir():
            write_peft(directory / name, config, number, arguments.rank)
    return names


if __name__ == "__main__":
    sys.exit(main())
