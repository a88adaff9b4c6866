"""Measure what KV pages on disk save after a restart.

    python -m bench.kv_cache --tokens 8000 --turns 1 -- --worker-threads 1

A server computes a long prefix and stops. Then a server with --kv-cache-dir and one without it
start, in turns, and each gets a request with that prefix and another end. Flags after `--` are
those of all servers. The exit code is 1 if the median ratio of the seconds is below --min-ratio, or
tokens differ.
"""

import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench.cli.command import EXIT_FAILED, EXIT_OK, command_parser, run_command
from bench.client.server import OwnServer
from bench.turns import Column, Turns, Variant, split_common
from quadriga.client import Client, SamplingParams

POLL_S = 0.05
START_TIMEOUT_S = 600.0
MIN_TOKEN, MAX_TOKEN = 1000, 20_000  # of random prompts
NUM_END_TOKENS, NUM_ANSWER_TOKENS = 20, 8
PARAMS = SamplingParams(temperature=0, max_new_tokens=NUM_ANSWER_TOKENS, ignore_eos=True)


class FirstAnswer(NamedTuple):
    """The first answer of a server, and the tokens and seconds of the pages that it loaded."""

    seconds: float
    token_ids: list[int]
    loaded_tokens: float = 0.0
    load_seconds: float = 0.0


COLUMNS: list[Column[FirstAnswer]] = [
    Column("first request, s", lambda answer: answer.seconds, 2),
    Column("loaded tokens", lambda answer: answer.loaded_tokens),
    Column("of it the load, s", lambda answer: answer.load_seconds, 2),
]


def random_tokens(source: random.Random, count: int) -> list[int]:
    """Return random token ids."""
    return [source.randint(MIN_TOKEN, MAX_TOKEN) for _ in range(count)]


def number_of(client: Client, name: str) -> float:
    """Return a number of the server info; 0 where it is not there."""
    value: Any = client.info().get(name, 0)
    return float(value)


def first_answer(flags: Sequence[str], prompt: list[int], num_stored: int = 0) -> FirstAnswer:
    """Start a server, time the answer to a prompt, and wait for tokens whose pages are stored."""
    server = OwnServer(Variant("", list(flags)).config([]), None)
    with server, Client(server.endpoint, connect_timeout=START_TIMEOUT_S) as client:
        began_at = time.perf_counter()
        answer = client.generate(prompt, PARAMS, timeout=START_TIMEOUT_S)
        seconds = time.perf_counter() - began_at
        num_pages = num_stored // number_of(client, "page_size")
        while number_of(client, "kv_offload_stored_pages_total") < num_pages:
            time.sleep(POLL_S)
        loaded = number_of(client, "kv_offload_loaded_tokens_total")
        load_s = number_of(client, "kv_offload_load_seconds_total")
        return FirstAnswer(seconds, answer.token_ids, loaded, load_s)


def prompt(turn: int, num_tokens: int, end: str) -> list[int]:
    """Return the prefix of a turn with one of its ends."""
    prefix = random_tokens(random.Random(turn), num_tokens)
    return prefix + random_tokens(random.Random(f"{turn}/{end}"), NUM_END_TOKENS)


def measure(num_tokens: int, num_turns: int, common: Sequence[str]) -> Turns[FirstAnswer]:
    """Return the first answers with the pages and without them."""
    turns: Turns[FirstAnswer] = Turns(["with --kv-cache-dir", "without"])
    with tempfile.TemporaryDirectory() as directory:
        stored = [*common, "--kv-cache-dir", directory]
        for turn in range(num_turns):
            cold = first_answer(stored, prompt(turn, num_tokens, "first"), num_tokens)
            print(f"turn {turn + 1}: {cold.seconds:.2f} s before the restart", flush=True)
        num_bytes = sum(path.stat().st_size for path in Path(directory).rglob("*.kv"))
        print(f"{num_bytes / 1e6:.0f} MB stored", flush=True)
        for turn, name in turns.order(num_turns):
            flags = common if name == "without" else stored
            answer = first_answer(flags, prompt(turn, num_tokens, "second"))
            turns.results[name].append(answer)
    return turns


def main() -> int:
    """Run the command line, and return the exit code."""
    parser = command_parser("bench.kv_cache", __doc__)
    parser.add_argument("--tokens", type=int, default=8000, help="of the prefix (default: 8000)")
    parser.add_argument("--turns", type=int, default=1, help="(default: 1)")
    parser.add_argument("--min-ratio", type=float, default=10.0, help="(default: 10)")
    own, common = split_common(sys.argv[1:])
    arguments = parser.parse_args(own)

    def work() -> int:
        room = ["--max-total-tokens", str(4 * arguments.tokens)]
        turns = measure(arguments.tokens, arguments.turns, [*room, *common])
        ratios = turns.ratios("without", lambda answer: answer.seconds)
        answers = [[one.token_ids for one in of] for of in turns.results.values()]
        is_equal = answers[0] == answers[1]
        print(turns.table(COLUMNS))
        print(f"ratio {ratios}, tokens {'equal' if is_equal else 'differ'}")
        is_fast = ratios is not None and ratios.median >= arguments.min_ratio
        return EXIT_OK if is_equal and is_fast else EXIT_FAILED

    return run_command("bench.kv_cache", work)


if __name__ == "__main__":
    sys.exit(main())
