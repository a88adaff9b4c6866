"""Measure models that take turns in a memory budget: `python -m bench.model_turns [-- FLAGS]`.

Two models have the same load, streams of a fixed length. First both are loaded, and one load runs
after the other: the time and the answers to compare with. Then the budget holds one model, and both
loads arrive together. Reported are the turns, the seconds of loading, the tokens per second against
those of the loads one after the other, the time to the first token, and whether every answer is the
same. FLAGS are those of the server.
"""

import asyncio
import json
import re
import statistics
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from bench.cli.command import EXIT_FAILED, EXIT_OK, command_parser, run_command
from bench.client.server import OwnServer
from bench.turns import split_common
from quadriga.client import AsyncClient
from quadriga.sampling.params import SamplingParams
from quadriga.server.config import server_config
from quadriga.server.config.parser import ServerParser
from quadriga.server.config.server_config import ServerConfig

START_TIMEOUT_S, TIMEOUT_S = 600.0, 3600.0
MODELS = {
    "first": {"model": "smollm2-135m", "dtype": "bfloat16", "quantization": "none"},
    "second": {"model": "smollm2-135m", "quantization": "int8"},
}
TOPICS = ("rivers", "clocks", "the sea", "bread", "maps", "bridges", "winter", "trains")
READY = "quadriga ready"
_LOADED = re.compile(r"model (\S+) is loaded after ([\d.]+) s")
_SUSPENDED = re.compile(r"model \S+ is suspended with")


class Streams(NamedTuple):
    """What the streams of a model gave.

    Attributes:
        answers: the ids of the tokens of each.
        ttft_s: seconds to the first token of each.
        ended_after_s: seconds until the last one had ended.
    """

    answers: list[list[int]]
    ttft_s: list[float]
    ended_after_s: float


async def run_streams(endpoint: str, model: str, num_streams: int, num_tokens: int) -> Streams:
    """Ask a model for texts that all have the same length."""
    params = SamplingParams(temperature=0, max_new_tokens=num_tokens, ignore_eos=True)
    began_at = time.monotonic()
    async with AsyncClient(endpoint, START_TIMEOUT_S, model=model) as client:

        async def one(number: int) -> tuple[list[int], float]:
            prompt = f"Text {number}: what I know about {TOPICS[number % len(TOPICS)]}."
            ids: list[int] = []
            first_s = 0.0
            async for chunk in client.stream(prompt, params, timeout=TIMEOUT_S):
                if not ids and chunk.token_ids:
                    first_s = time.monotonic() - began_at
                ids += chunk.token_ids
            return ids, first_s

        found = await asyncio.gather(*(one(number) for number in range(num_streams)))
    answers, ttft_s = zip(*found, strict=True)
    return Streams(list(answers), list(ttft_s), time.monotonic() - began_at)


async def _run_both(endpoint: str, options: Namespace) -> dict[str, Streams]:
    sizes = options.streams, options.tokens
    found = await asyncio.gather(*(run_streams(endpoint, name, *sizes) for name in MODELS))
    return dict(zip(MODELS, found, strict=True))


def measure(config: ServerConfig, options: Namespace, directory: Path) -> int:
    """Run the loads, print the comparison, and return the exit code."""
    one_by_one: dict[str, Streams] = {}
    log = directory / "all.log"
    with OwnServer(config, log) as server:
        _wait(server, log)
        for name in MODELS:
            asyncio.run(run_streams(server.endpoint, name, 2, 2))  # the first steps tune something
            load = run_streams(server.endpoint, name, options.streams, options.tokens)
            one_by_one[name] = asyncio.run(load)
    turns = config.replace(model_memory=options.memory, model_turn=options.turn)
    log = directory / "turns.log"
    with OwnServer(turns, log) as server:
        _wait(server, log)
        together = asyncio.run(_run_both(server.endpoint, options))
    return _report(one_by_one, together, log.read_text(), options)


def _wait(server: OwnServer, log: Path) -> None:
    """Wait until a server has loaded all models that it loads at its start."""
    asyncio.run(server.wait_info())
    while READY not in log.read_text():
        server.check()
        time.sleep(0.05)


def _report(
    alone: dict[str, Streams], together: dict[str, Streams], log: str, options: Namespace
) -> int:
    num_tokens = options.streams * options.tokens
    for name, streams in alone.items():
        rate = num_tokens / streams.ended_after_s
        print(f"{name} alone: {streams.ended_after_s:.1f} s, {rate:.0f} tokens/s")
    alone_s = sum(streams.ended_after_s for streams in alone.values())
    together_s = max(streams.ended_after_s for streams in together.values())
    loads = [float(seconds) for _, seconds in _LOADED.findall(log)]
    print(
        f"together: {together_s:.1f} s, {2 * num_tokens / together_s:.0f} tokens/s,"
        f" {alone_s / together_s:.2f} of those one after the other ({alone_s:.1f} s)"
    )
    print(
        f"  {len(_SUSPENDED.findall(log))} times a busy model was suspended; {len(loads)} loads of"
        f" {', '.join(f'{seconds:.1f}' for seconds in loads)} s: {sum(loads):.1f} s"
    )
    for name, streams in together.items():
        median = statistics.median(streams.ttft_s)
        print(
            f"  {name}: first token after {median:.1f} s (median), {max(streams.ttft_s):.1f} s"
            f" (longest); all ended after {streams.ended_after_s:.1f} s"
        )
    num_different = sum(
        answer != expected
        for name in MODELS
        for answer, expected in zip(together[name].answers, alone[name].answers, strict=True)
    )
    print(f"  {num_different} of {2 * options.streams} answers differ")
    return EXIT_FAILED if num_different else EXIT_OK


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    own, flags = split_common(sys.argv[1:] if arguments is None else list(arguments))
    parser = command_parser("bench.model_turns", __doc__)
    parser.add_argument("--streams", type=int, default=64, help="of each model")
    parser.add_argument("--tokens", type=int, default=128, help="of each stream")
    parser.add_argument("--memory", type=float, default=0.9, help="the budget, in GiB")
    parser.add_argument("--turn", type=float, default=60.0, help="longest turn, in seconds")
    options = parser.parse_args(own)

    def work() -> int:
        with tempfile.TemporaryDirectory() as name:
            models = Path(name) / "models.yaml"
            models.write_text(json.dumps(MODELS))
            server_flags = ["--models", str(models), *flags]
            namespace = ServerParser("bench.model_turns").parse_flags(server_flags)
            return measure(server_config.from_namespace(namespace), options, Path(name))

    return run_command("bench.model_turns", work)


if __name__ == "__main__":
    sys.exit(main())
