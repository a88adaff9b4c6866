"""Measure streams beside long prompts, with and without --prefill-replicas.

    python -m bench.prefill_apart \
      "apart: --prefill-replicas 1" "mixed: " "target: --itl-target 60" -- --dp 2 --worker-threads 1

Each variant has its server in turn, with the flags after `--`, too. Streams of short prompts run
all the time, and long prompts come beside them, one at a time. Measured are the times between the
tokens of the streams, the times to the first tokens of the long prompts, and the pages that moved,
beside a copy of as many bytes in memory.
"""

import argparse
import asyncio
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from bench.cli.command import EXIT_OK, command_parser, run_command, run_until_signal
from bench.client.server import serving
from bench.report.table import FigureRow, add_json_flag, show
from bench.turns import VARIANTS_HELP, Turns, Variant, split_common, variant_of
from quadriga.client import AsyncClient, SamplingParams
from quadriga.clock import now

STREAM_PROMPT, STREAM_TOKENS, ANSWER_TOKENS = 32, 512, 32
WARM_UP_S = 3.0
MIN_TOKEN_ID, MAX_TOKEN_ID = 1000, 20_000
MS, MB = 1000, 1e6


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command, and return the exit code."""
    own, common = split_common(sys.argv[1:] if argv is None else argv)
    parser = command_parser("bench.prefill_apart", __doc__)
    parser.add_argument("variants", nargs="+", metavar="VARIANT", help=VARIANTS_HELP)
    parser.add_argument("--streams", type=int, default=16, metavar="N",
                        help="streams at one time (default: 16)")  # fmt: skip
    parser.add_argument("--prompt-tokens", type=int, default=6000, metavar="N",
                        help="of a long prompt (default: 6000)")  # fmt: skip
    parser.add_argument("--prompts", type=int, default=6, metavar="N",
                        help="long prompts of a turn (default: 6)")  # fmt: skip
    parser.add_argument("--pause", type=float, default=2.0, metavar="S",
                        help="from the end of one to the next (default: 2)")  # fmt: skip
    parser.add_argument("--turns", type=int, default=3, metavar="N", help="(default: 3)")
    add_json_flag(parser)
    arguments = parser.parse_args(own)
    variants = [variant_of(text) for text in arguments.variants]
    work = _measure(arguments, variants, common)
    return run_command("bench.prefill_apart", lambda: run_until_signal(work))


@dataclass
class StreamTurn:
    """What a server did in a turn. Times are in seconds.

    Attributes:
        gaps: between two tokens of a stream.
        first_tokens: from the submission of a long prompt to its first token.
        longest_gaps: the longest time between two tokens of its answer.
        seconds: how long the turn was.
        info: the server's, after the turn.
    """

    gaps: list[float] = field(default_factory=list)
    first_tokens: list[float] = field(default_factory=list)
    longest_gaps: list[float] = field(default_factory=list)
    seconds: float = 0.0
    info: dict[str, Any] = field(default_factory=dict)


async def _measure(
    arguments: argparse.Namespace, variants: Sequence[Variant], common: Sequence[str]
) -> int:
    turns = Turns[StreamTurn]([variant.name for variant in variants])
    by_name = {variant.name: variant for variant in variants}
    about = ""
    for number, name in turns.order(arguments.turns, note="prefill apart"):
        flags = [*common, *by_name[name].flags]
        async with serving(flags) as (own, info), AsyncClient(own.endpoint) as client:
            about = f"{info['model']} in {info['dtype']}"
            turns.results[name].append(await _turn(client, arguments, number))
    title = (
        f"{about}: {arguments.streams} streams beside {arguments.prompts} prompts of"
        f" {arguments.prompt_tokens} tokens, {arguments.turns} turns"
    )
    show(title, [_row(name, results) for name, results in turns.results.items()], arguments.json)
    return EXIT_OK


async def _turn(client: AsyncClient, arguments: argparse.Namespace, seed: int) -> StreamTurn:
    load = _Load(client, seed)
    streams = [asyncio.ensure_future(load.run_stream()) for _ in range(arguments.streams)]
    await asyncio.sleep(WARM_UP_S)
    load.is_measured, began_at = True, now()
    for _ in range(arguments.prompts):
        await load.ask(arguments.prompt_tokens)
        await asyncio.sleep(arguments.pause)
    load.turn.seconds = now() - began_at
    load.turn.info = await client.info()
    for task in streams:
        task.cancel()
    await asyncio.gather(*streams, return_exceptions=True)
    return load.turn


class _Load:
    """The requests of a turn.

    Attributes:
        turn: what is measured, as soon as `is_measured` is set.
    """

    def __init__(self, client: AsyncClient, seed: int) -> None:
        self._client = client
        self._draw = random.Random(seed)
        self.is_measured = False
        self.turn = StreamTurn()

    def _prompt(self, length: int) -> list[int]:
        return self._draw.choices(range(MIN_TOKEN_ID, MAX_TOKEN_ID), k=length)

    async def run_stream(self) -> None:
        """Stream one answer after the other."""
        params = SamplingParams(max_new_tokens=STREAM_TOKENS, ignore_eos=True)
        while True:
            last_at = 0.0
            async for chunk in self._client.stream(self._prompt(STREAM_PROMPT), params):
                for token_at in chunk.token_times:
                    if last_at and self.is_measured:
                        self.turn.gaps.append(token_at - last_at)
                    last_at = token_at

    async def ask(self, num_tokens: int) -> None:
        """Wait for the answer to a long prompt."""
        params = SamplingParams(max_new_tokens=ANSWER_TOKENS, ignore_eos=True)
        began_at, times = now(), list[float]()
        async for chunk in self._client.stream(self._prompt(num_tokens), params):
            times += chunk.token_times
        self.turn.first_tokens.append(times[0] - began_at)
        self.turn.longest_gaps.append(max(np.diff(times)))


def _row(name: str, turns: Sequence[StreamTurn]) -> FigureRow:
    gaps = np.concatenate([turn.gaps for turn in turns])
    first = [seconds for turn in turns for seconds in turn.first_tokens]
    gaps_after = [seconds for turn in turns for seconds in turn.longest_gaps]
    row: dict[str, str | int | float | None] = {
        "server": name,
        "ITL p50, ms": MS * float(np.percentile(gaps, 50)),
        "p99": MS * float(np.percentile(gaps, 99)),
        "longest": MS * float(gaps.max()),
        "stream tokens/s": len(gaps) / sum(turn.seconds for turn in turns),
        "TTFT p50, s": float(np.median(first)),
        "longest gap after it, ms": MS * float(np.median(gaps_after)),
    }
    num_bytes = sum(turn.info.get("kv_transfer_bytes_total", 0) for turn in turns)
    seconds = sum(turn.info.get("kv_transfer_seconds_total", 0.0) for turn in turns)
    if num_bytes:
        num_prompts = len(first)
        row["MB a prompt"] = num_bytes / num_prompts / MB
        row["ms a prompt"] = MS * seconds / num_prompts
        row["ms of a copy"] = MS * _copy_seconds(num_bytes // num_prompts)
    return row


def _copy_seconds(num_bytes: int) -> float:
    """Return the seconds of a copy in memory, the best of some."""
    source, target = np.ones(num_bytes, np.uint8), np.zeros(num_bytes, np.uint8)
    found = []
    for _ in range(5):
        began = time.perf_counter()
        np.copyto(target, source)
        found.append(time.perf_counter() - began)
    return min(found)


if __name__ == "__main__":
    sys.exit(main())
