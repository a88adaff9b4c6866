"""Loads in which long prompts meet short ones."""

import random
from collections.abc import Iterator

from bench.load.synthetic import Lengths
from bench.load.trace import TraceRequest

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
