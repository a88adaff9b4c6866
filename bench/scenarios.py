"""Loads of hard situations; `python -m bench.scenarios NAME FILE` writes one as a trace.

long-prompt        16 streams (client 0), and after 3 s a prompt of 6,000 tokens (client 1)
one-beside-many    1,000 requests at once (client 0), and after 2 s a single one (client 1)
two-lengths        100 requests at once, in random order: 88 of 16 tokens, 12 of 256
long-among-short   60 short prompts at 4 a second (client 0), and one of 6,000 tokens (client 1)
mooncake-like      600 requests of 16 to 6,000 tokens at 0.8 a second, with shared beginnings
"""

import random
from collections.abc import Callable, Iterator
from pathlib import Path

from bench.cli.command import command_parser
from bench.load.synthetic import Lengths
from simulator.trace import TraceRequest, write_trace


def long_prompt() -> list[TraceRequest]:
    """Return 16 streams and a long prompt of another client."""
    streams = [TraceRequest(0.0, ((i, 64),), max_new_tokens=384) for i in range(16)]
    return [*streams, TraceRequest(3.0, ((100, 6000),), max_new_tokens=16, client=1)]


def one_beside_many() -> list[TraceRequest]:
    """Return a burst of one client and a single request of another."""
    many = [TraceRequest(0.0, ((i, 16),), max_new_tokens=16) for i in range(1000)]
    return [*many, TraceRequest(2.0, ((5000, 16),), max_new_tokens=16, client=1)]


def two_lengths() -> list[TraceRequest]:
    """Return many short requests and a few long ones."""
    lengths = [16] * 88 + [256] * 12
    random.Random(0).shuffle(lengths)
    return [TraceRequest(0.0, ((i, 32),), max_new_tokens=n) for i, n in enumerate(lengths)]


SHORT_INPUT, SHORT_OUTPUT = Lengths(16, 64), Lengths(16, 48)
LONG_INPUT, LONG_OUTPUT = 6000, 32
LONG_CLIENT = 1  # short ones are of client 0

# After the conversations of Mooncake's trace: most of a prompt may be that of an earlier one, in
# blocks of 512 tokens, and few prompts have most of the tokens. There the mean is 12,000 tokens; a
# server on a CPU has an eighth of it.
BLOCK_TOKENS = 512
MOONCAKE_INPUT = Lengths.parse("lognormal:1200:1.2:16:6000")
MOONCAKE_OUTPUT = Lengths.parse("lognormal:40:0.8:4:256")
MOONCAKE_REUSE = 0.35  # share of prompts that begin like an earlier one


def long_among_short(
    num_short: int, rate: float, num_long: int, seed: int = 0
) -> list[TraceRequest]:
    """Return short prompts at a rate per second, and 6,000-token prompts spread evenly among them.

    Without long prompts, the short ones are the same.
    """
    source, arrivals = random.Random(f"{seed}/short"), random.Random(f"{seed}/arrivals")
    at, requests = 0.0, []
    for number in range(num_short):
        segments = ((number, SHORT_INPUT.draw(source)),)
        requests.append(TraceRequest(at, segments, SHORT_OUTPUT.draw(source)))
        at += arrivals.expovariate(rate)
    for number in range(num_long):
        segments = ((num_short + number, LONG_INPUT),)
        sent_at = at * (number + 0.5) / num_long
        requests.append(TraceRequest(sent_at, segments, LONG_OUTPUT, client=LONG_CLIENT))
    return sorted(requests, key=lambda request: request.at)


def mooncake_like(num_requests: int, rate: float, seed: int = 0) -> Iterator[TraceRequest]:
    """Yield requests with the shape of Mooncake's trace, at a rate per second."""
    source = random.Random(f"{seed}/mooncake")
    earlier: list[list[tuple[int, int]]] = []
    at, num_segments = 0.0, 0
    for _ in range(num_requests):
        left = MOONCAKE_INPUT.draw(source)
        blocks: list[tuple[int, int]] = []
        if earlier and source.random() < MOONCAKE_REUSE:
            blocks = source.choice(earlier)[: max(0, (left - 1) // BLOCK_TOKENS)]
            left -= BLOCK_TOKENS * len(blocks)
        segments = list(blocks)
        while left > 0:
            segments.append((num_segments, min(left, BLOCK_TOKENS)))
            num_segments += 1
            left -= BLOCK_TOKENS
        earlier.append([segment for segment in segments if segment[1] == BLOCK_TOKENS])
        yield TraceRequest(at, tuple(segments), MOONCAKE_OUTPUT.draw(source))
        at += source.expovariate(rate)


SCENARIOS: dict[str, Callable[[], list[TraceRequest]]] = {
    "long-prompt": long_prompt,
    "one-beside-many": one_beside_many,
    "two-lengths": two_lengths,
    "long-among-short": lambda: long_among_short(60, 4.0, 1),
    "mooncake-like": lambda: list(mooncake_like(600, 0.8)),
}


def main() -> None:
    """Write the trace that the command line names."""
    parser = command_parser("bench.scenarios", __doc__)
    parser.add_argument("name", choices=SCENARIOS)
    parser.add_argument("file", type=Path)
    arguments = parser.parse_args()
    write_trace(arguments.file, SCENARIOS[arguments.name]())


if __name__ == "__main__":
    main()
