"""Write a trace of a hard situation: `python -m bench.scenarios NAME FILE`.

long-prompt        16 streams (client 0), and after 3 s a prompt of 6,000 tokens (client 1)
one-beside-many    1,000 requests at once (client 0), and after 2 s a single one (client 1)
two-lengths        100 requests at once, in random order: 88 of 16 tokens, 12 of 256
"""

import random
from collections.abc import Callable
from pathlib import Path

from bench.command import command_parser
from bench.load.trace import TraceRequest, write_trace


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


SCENARIOS: dict[str, Callable[[], list[TraceRequest]]] = {
    "long-prompt": long_prompt,
    "one-beside-many": one_beside_many,
    "two-lengths": two_lengths,
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
