"""Measure a server with many more adapters than places: `python -m bench.many_adapters`.

Random adapters of a model, whose answers are taken first, one after the other. Then streams name
them with Zipf frequencies for --seconds: reported are the loads a second, the time to the first
token where the adapter was loaded and where it was not, and whether each answer is the same as
before. At last adapters are loaded and unloaded --changes times under that load: reported are the
requests that have failed and the memory of the server before and after. Flags of the server follow
after `--`.
"""

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from bench.cli.command import EXIT_FAILED, EXIT_OK, command_parser, run_command, run_until_signal
from bench.client.server import config_of, free_port, serving
from bench.load.random_adapters import write_peft
from bench.report.table import FigureRow, add_json_flag, show
from bench.turns import split_common
from quadriga.client import AsyncClient, SamplingParams
from quadriga.errors import QuadrigaError
from quadriga.server.models.resolve import resolve_model

ANSWER_TOKENS = 16
PROMPT = "Text: what I know about rivers."
SETTLE_S = 65.0  # copies without a name are removed by then


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command, and return the exit code."""
    own, server_flags = split_common(sys.argv[1:] if argv is None else argv)
    parser = command_parser("bench.many_adapters", __doc__)
    parser.add_argument("--adapters", type=int, default=200, metavar="N", help="(default: 200)")
    parser.add_argument("--places", type=int, default=16, metavar="N",
                        help="--max-loras of the server (default: 16)")  # fmt: skip
    parser.add_argument("--rank", type=int, default=16, metavar="R", help="(default: 16)")
    parser.add_argument("--streams", type=int, default=32, metavar="N",
                        help="at one time (default: 32)")  # fmt: skip
    parser.add_argument("--seconds", type=float, default=30.0, metavar="S",
                        help="of the load (default: 30)")  # fmt: skip
    parser.add_argument("--changes", type=int, default=1000, metavar="N",
                        help="loads and unloads under load (default: 1000)")  # fmt: skip
    add_json_flag(parser)
    arguments = parser.parse_args(own)
    work = _measure(arguments, server_flags)
    return run_command("bench.many_adapters", lambda: run_until_signal(work))


@dataclass(slots=True)
class ZipfLoad:
    """Streams whose adapters are chosen by Zipf's law.

    Attributes:
        expected: the tokens of each adapter's answer.
        ttft_s: seconds to the first token of each stream.
        num_wrong: answers with other tokens.
        errors: what went wrong in others.
    """

    endpoint: str
    expected: dict[str, list[int]]
    ttft_s: list[float] = field(default_factory=list)
    num_wrong: int = 0
    errors: list[str] = field(default_factory=list)

    async def run(self, num_streams: int, until: float, seed: int = 0) -> None:
        """Stream until a time of the monotonic clock."""
        names = list(self.expected)
        weights = [1 / (place + 1) for place in range(len(names))]
        choose = random.Random(seed)
        async with AsyncClient(self.endpoint) as client:

            async def stream() -> None:
                while time.monotonic() < until:
                    (name,) = choose.choices(names, weights)
                    await self._one(client, name)

            await asyncio.gather(*(stream() for _ in range(num_streams)))

    async def _one(self, client: AsyncClient, name: str) -> None:
        began_at = time.monotonic()
        ids: list[int] = []
        try:
            async for chunk in client.stream(PROMPT, _params(), adapter=name):
                if not ids and chunk.token_ids:
                    self.ttft_s.append(time.monotonic() - began_at)
                ids += chunk.token_ids
        except QuadrigaError as error:
            self.errors.append(f"{name}: {error}")
            return
        self.num_wrong += ids != self.expected[name]


def _params() -> SamplingParams:
    return SamplingParams(temperature=0, max_new_tokens=ANSWER_TOKENS, ignore_eos=True)


async def _measure(arguments: argparse.Namespace, server_flags: Sequence[str]) -> int:
    model = resolve_model(config_of(server_flags).model)
    port = free_port()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        names = [f"adapter-{number}" for number in range(arguments.adapters)]
        for number, adapter in enumerate(names):
            write_peft(directory / adapter, model.config, number, arguments.rank)
        flags = [*server_flags, "--lora-dir", name, "--enable-lora"]
        flags += ["--max-loras", str(arguments.places)]
        async with serving(flags, http_port=port) as (server, _):
            expected = await _answers(server.endpoint, names)
            zipf = await _zipf(arguments, server.endpoint, expected)
            show("Zipf load", [zipf[1]], arguments.json)
            changes = await _changes(arguments, server.endpoint, port, directory, expected)
            show("Loads and unloads under load", [changes[1]], arguments.json)
    loads = [zipf[0], changes[0]]
    for load in loads:
        print(*load.errors[:5], sep="\n")
    is_clean = not any(load.num_wrong or load.errors for load in loads)
    return EXIT_OK if is_clean else EXIT_FAILED


async def _answers(endpoint: str, names: Sequence[str]) -> dict[str, list[int]]:
    """Return the tokens that each adapter answers alone."""
    async with AsyncClient(endpoint) as client:
        return {
            name: (await client.generate(PROMPT, _params(), adapter=name)).token_ids
            for name in names
        }


async def _zipf(
    arguments: argparse.Namespace, endpoint: str, expected: dict[str, list[int]]
) -> tuple[ZipfLoad, FigureRow]:
    load = ZipfLoad(endpoint, expected)
    async with AsyncClient(endpoint) as client:
        before = (await client.info())["adapters"]
        began_at = time.monotonic()
        await load.run(arguments.streams, began_at + arguments.seconds)
        seconds = time.monotonic() - began_at
        after = (await client.info())["adapters"]
    num_loads = after["loads"] - before["loads"]
    ordered = sorted(load.ttft_s)
    return load, {
        "answers/s": len(ordered) / seconds,
        "loads/s": num_loads / seconds,
        "ms a load": 1000 * (after["load_seconds"] - before["load_seconds"]) / max(1, num_loads),
        "TTFT p50 ms": 1000 * statistics.median(ordered),
        "TTFT p99 ms": 1000 * ordered[int(0.99 * (len(ordered) - 1))],
        "wrong": load.num_wrong,
        "failed": len(load.errors),
    }


async def _changes(
    arguments: argparse.Namespace,
    endpoint: str,
    port: int,
    directory: Path,
    expected: dict[str, list[int]],
) -> tuple[ZipfLoad, FigureRow]:
    """Load and unload adapters under load."""
    load, before = ZipfLoad(endpoint, expected), await _megabytes(endpoint)
    began_at = time.monotonic()
    ends = asyncio.Event()

    async def stream() -> None:
        while not ends.is_set():
            await load.run(arguments.streams // 2, time.monotonic() + 1.0, len(load.ttft_s))

    streaming = asyncio.ensure_future(stream())
    paths = [str(directory / name) for name in expected]
    for number in range(arguments.changes):
        body = {"lora_name": "changed", "lora_path": paths[number % len(paths)]}
        await asyncio.to_thread(_post, port, "/v1/load_lora_adapter", body)
        await asyncio.to_thread(_post, port, "/v1/unload_lora_adapter", {"lora_name": "changed"})
    seconds = time.monotonic() - began_at
    ends.set()
    await streaming
    await asyncio.sleep(SETTLE_S if arguments.changes else 0.0)
    return load, {
        "changes/s": arguments.changes / seconds if arguments.changes else 0.0,
        "MB before": before,
        "MB after": await _megabytes(endpoint),
        "wrong, changing": load.num_wrong,
        "failed, changing": len(load.errors),
    }


def _post(port: int, path: str, body: dict[str, str]) -> None:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        answer.read()


async def _megabytes(endpoint: str) -> float:
    """Return the memory of the server's processes."""
    async with AsyncClient(endpoint) as client:
        pids = (await client.info())["pids"]
    return sum(float(psutil.Process(pid).memory_full_info().pss) for pid in pids.values()) / 1e6


if __name__ == "__main__":
    sys.exit(main())
