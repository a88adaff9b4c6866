"""Measure chats and embeddings of one decoder: each alone, both at once, and with --itl-target.

    python -m bench.chat_and_embeddings                       # the built-in model, --pooling mean
    python -m bench.chat_and_embeddings --streams 8 --text-tokens 128 -- --dtype float32

Chats stream on a server with the flags after `--`, and batches of texts become vectors. Phases take
turns: chats alone, embeddings alone, both. Then the same on a server whose `--itl-target` is
--target-ratio times the TPOT of chats alone. A figure is the median over the turns.
"""

import argparse
import asyncio
import random
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import suppress

from bench.cli.command import EXIT_OK, command_parser, run_command, run_until_signal
from bench.client.server import serving
from bench.load.natural import natural_texts
from bench.report.table import FigureRow, add_json_flag, show
from bench.turns import split_common
from quadriga.client import AsyncClient, SamplingParams

ANSWER_TOKENS, MIN_TOKENS = 64, 8
TEXTS_OF_REQUEST, REQUESTS_AT_ONCE = 4, 16
CHATS, EMBEDDINGS, BOTH = "chats alone", "embeddings alone", "both"
MIN_TOKEN_ID, MAX_TOKEN_ID = 1000, 20_000


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command, and return the exit code."""
    own, server_flags = split_common(sys.argv[1:] if argv is None else argv)
    parser = command_parser("bench.chat_and_embeddings", __doc__)
    parser.add_argument("--streams", type=int, default=4, metavar="N",
                        help="chats at one time (default: 4)")  # fmt: skip
    parser.add_argument("--text-tokens", type=int, default=64, metavar="N",
                        help="of a text that becomes a vector (default: 64)")  # fmt: skip
    parser.add_argument("--seconds", type=float, default=6.0, metavar="S",
                        help="of a phase (default: 6)")  # fmt: skip
    parser.add_argument("--turns", type=int, default=3, metavar="N", help="(default: 3)")
    parser.add_argument("--target-ratio", type=float, default=1.05, metavar="X",
                        help="--itl-target over TPOT of chats alone (default: 1.05)")  # fmt: skip
    add_json_flag(parser)
    arguments = parser.parse_args(own)
    work = _measure(arguments, server_flags)
    return run_command("bench.chat_and_embeddings", lambda: run_until_signal(work))


class LoadPhase:
    """One load or both, for some seconds.

    Attributes:
        tpots: seconds per token of each chat, of MIN_TOKENS or more tokens within the phase.
        num_texts: texts that became vectors.
        seconds: how long it took.
    """

    def __init__(self) -> None:
        self.tpots: list[float] = []
        self.num_texts = 0
        self.seconds = 0.0


async def _measure(arguments: argparse.Namespace, server_flags: Sequence[str]) -> int:
    rows: list[FigureRow] = []
    flags = ["--pooling", "mean", *server_flags]
    async with serving(flags) as (own, info), AsyncClient(own.endpoint) as client:
        plain = await _phases(client, arguments)
    rows += _rows("default", plain)
    target_ms = 1000 * arguments.target_ratio * _tpot(plain[CHATS])
    flags += ["--itl-target", f"{target_ms:.2f}"]
    async with serving(flags) as (own, _), AsyncClient(own.endpoint) as client:
        rows += _rows(f"--itl-target {target_ms:.1f}", await _phases(client, arguments))
    title = (
        f"{info['model']} in {info['dtype']}: {arguments.streams} chats, and texts of"
        f" {arguments.text_tokens} tokens that become vectors"
    )
    show(title, rows, arguments.json)
    return EXIT_OK


async def _phases(client: AsyncClient, arguments: argparse.Namespace) -> dict[str, list[LoadPhase]]:
    """Return the phases of each kind; a first turn warms up."""
    phases: dict[str, list[LoadPhase]] = {CHATS: [], EMBEDDINGS: [], BOTH: []}
    for turn in range(-1, arguments.turns):
        for kind, of_kind in phases.items():
            phase = await _phase(client, arguments, kind, seed=turn)
            if turn >= 0:
                of_kind.append(phase)
    return phases


async def _phase(
    client: AsyncClient, arguments: argparse.Namespace, kind: str, seed: int
) -> LoadPhase:
    phase, draw = LoadPhase(), random.Random(f"{seed}/{kind}")
    prompts = iter(natural_texts(4096, draw.randrange(10**6)))

    async def chat() -> None:
        params = SamplingParams(max_new_tokens=ANSWER_TOKENS, ignore_eos=True)
        while True:
            turns = [{"role": "user", "content": next(prompts)}]
            times: list[float] = []
            try:
                async for chunk in client.stream(turns, params):
                    times += chunk.token_times
            finally:  # the phase ends in the middle of a chat
                if len(times) >= MIN_TOKENS:
                    phase.tpots.append((times[-1] - times[0]) / (len(times) - 1))

    async def embed() -> None:
        while True:
            texts = [
                draw.choices(range(MIN_TOKEN_ID, MAX_TOKEN_ID), k=arguments.text_tokens)
                for _ in range(TEXTS_OF_REQUEST)
            ]
            await client.embed(texts)
            phase.num_texts += len(texts)

    loads = [chat] * arguments.streams * (kind != EMBEDDINGS)
    loads += [embed] * REQUESTS_AT_ONCE * (kind != CHATS)
    began = time.perf_counter()
    tasks = [asyncio.ensure_future(load()) for load in loads]
    await asyncio.wait(tasks, timeout=arguments.seconds, return_when=asyncio.FIRST_EXCEPTION)
    phase.seconds = time.perf_counter() - began
    for task in tasks:
        task.cancel()
    for task in tasks:
        with suppress(asyncio.CancelledError):
            await task
    return phase


def _rows(server: str, phases: dict[str, list[LoadPhase]]) -> list[FigureRow]:
    alone_s, alone_rate = _tpot(phases[CHATS]), _rate(phases[EMBEDDINGS])
    both_s, both_rate = _tpot(phases[BOTH]), _rate(phases[BOTH])
    return [
        {
            "server": server,
            "TPOT alone, ms": 1000 * alone_s,
            "beside embeddings": 1000 * both_s,
            "ratio": both_s / alone_s,
            "texts/s alone": alone_rate,
            "beside chats": both_rate,
            "share": both_rate / alone_rate,
        }
    ]


def _tpot(phases: list[LoadPhase]) -> float:
    return statistics.median(tpot for phase in phases for tpot in phase.tpots)


def _rate(phases: list[LoadPhase]) -> float:
    return statistics.median(phase.num_texts / phase.seconds for phase in phases)


if __name__ == "__main__":
    sys.exit(main())
