"""Measure what KV pages on disk save.

    python -m bench.kv_cache --tokens 8000 --turns 1 --streams 64

After a restart: a server computes a long prefix and stops. Then a server with --kv-cache-dir and
one without it start, in turns, and each gets a request with that prefix and another end.

After a crash: requests run at one time, and the worker is killed when they have generated half of
their tokens. What the steps compute beyond those of a run without a crash was computed again; a
step that was lost does not count.

The exit code is 1 if the smallest ratio of the seconds is below --min-ratio, or tokens differ.
"""

import argparse
import os
import random
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

from bench.cli.command import command_parser
from quadriga.client import SamplingParams
from quadriga.llm.llm import LLM
from quadriga.server.config.engine_args import BUILTIN_MODEL

EXIT_TOO_SLOW = 1
POLL_S = 0.05
MIN_TOKEN, MAX_TOKEN = 1000, 20_000  # of random prompts
NUM_END_TOKENS, NUM_ANSWER_TOKENS = 20, 8


class FirstAnswer(NamedTuple):
    """The first answer of a server."""

    seconds: float
    token_ids: list[int]


def random_prompt(source: random.Random, num_tokens: int) -> list[int]:
    """Return random token ids."""
    return [source.randint(MIN_TOKEN, MAX_TOKEN) for _ in range(num_tokens)]


def params(num_tokens: int) -> SamplingParams:
    """Return the parameters of greedy answers of one length."""
    return SamplingParams(temperature=0, max_new_tokens=num_tokens, ignore_eos=True)


def first_answer(llm: LLM, prompt: list[int]) -> FirstAnswer:
    """Time the answer to a prompt."""
    began_at = time.perf_counter()
    answer = llm.generate(prompt, params(NUM_ANSWER_TOKENS))
    return FirstAnswer(time.perf_counter() - began_at, answer.token_ids)


def wait_until_stored(llm: LLM, num_pages: int) -> None:
    """Wait until so many pages are on the disk."""
    while number_of(llm, "kv_offload_stored_pages_total") < num_pages:
        time.sleep(POLL_S)


def number_of(llm: LLM, name: str) -> float:
    """Return a number of the server info; 0 where it is not there."""
    value: Any = llm.client.info().get(name, 0)
    return float(value)


def measure_restart(args: argparse.Namespace, flags: dict[str, Any], turn: int) -> float:
    """Print the seconds of the first request with and without the pages; return their ratio."""
    source = random.Random(turn)
    prefix, end = random_prompt(source, args.tokens), random_prompt(source, NUM_END_TOKENS)
    with tempfile.TemporaryDirectory() as directory:
        stored: dict[str, Any] = {**flags, "kv_cache_dir": directory}
        with LLM(args.model, **stored) as llm:
            cold = first_answer(llm, [*prefix, *random_prompt(source, NUM_END_TOKENS)])
            page_size = number_of(llm, "page_size")
            wait_until_stored(llm, int(args.tokens // page_size))
        num_bytes = sum(path.stat().st_size for path in Path(directory).rglob("*.kv"))
        found: dict[bool, FirstAnswer] = {}
        for with_pages in (True, False) if turn % 2 else (False, True):
            with LLM(args.model, **(stored if with_pages else flags)) as llm:
                found[with_pages] = first_answer(llm, [*prefix, *end])
                load_s = number_of(llm, "kv_offload_load_seconds_total") if with_pages else 0.0
                if with_pages:
                    loaded = f"{number_of(llm, 'kv_offload_loaded_tokens_total'):.0f}"
                    loaded += f" tokens, {num_bytes / 1e6:.0f} MB in {load_s:.2f} s"
    ratio = found[False].seconds / found[True].seconds
    equal = "yes" if found[False].token_ids == found[True].token_ids else "no"
    print(
        f"| {turn} | {cold.seconds:.2f} | {found[False].seconds:.2f} | {found[True].seconds:.2f} |"
        f" {ratio:.1f} | {loaded} | {equal} |",
        flush=True,
    )
    return ratio if equal == "yes" else 0.0


def computed_tokens(llm: LLM) -> int:
    """Return the number of tokens that the steps of a server have computed."""
    histogram: Any = llm.client.info()["step_tokens"]
    return int(histogram["sum"])


def run_streams(
    args: argparse.Namespace, flags: dict[str, Any], kill: bool
) -> tuple[int, list[Any]]:
    """Run requests at one time, and perhaps kill the worker. Return the tokens that were computed.

    The answers' tokens are returned, too.
    """
    source = random.Random(99)
    prompts = [random_prompt(source, args.prompt_tokens) for _ in range(args.streams)]
    with LLM(args.model, **flags) as llm:
        killer = threading.Thread(target=_kill_half_way, args=(llm, args))
        if kill:
            killer.start()
        answers = llm.generate(prompts, params(args.max_tokens))
        if kill:
            killer.join()
        return computed_tokens(llm), [answer.token_ids for answer in answers]


def _kill_half_way(llm: LLM, args: argparse.Namespace) -> None:
    """Kill the worker when half of all tokens are there."""
    while number_of(llm, "generation_tokens_total") < args.streams * args.max_tokens / 2:
        time.sleep(POLL_S)
    pids: Any = llm.client.info()["pids"]
    os.kill(pids["worker_proc"], signal.SIGKILL)


def measure_crash(args: argparse.Namespace, flags: dict[str, Any]) -> bool:
    """Print how many tokens a crash lets the worker compute again. Return whether texts agree."""
    undisturbed, expected = run_streams(args, flags, kill=False)
    print(f"{args.streams} streams, prompts of {args.prompt_tokens}, answers of {args.max_tokens}")
    print("\n| worker killed half-way | computed | computed again | equal answers |")
    print("|---|---|---|---|")
    is_equal = True
    for with_pages in (False, True):
        with tempfile.TemporaryDirectory() as directory:
            chosen = {**flags, "kv_cache_dir": directory} if with_pages else flags
            computed, answers = run_streams(args, chosen, kill=True)
        num_equal = sum(one == other for one, other in zip(answers, expected, strict=True))
        is_equal &= num_equal == args.streams
        name = "with --kv-cache-dir" if with_pages else "without"
        again = computed - undisturbed
        print(f"| {name} | {computed} | {again} | {num_equal} of {args.streams} |", flush=True)
    return is_equal


def main() -> None:
    """Run the command line."""
    parser = command_parser("bench.kv_cache", __doc__)
    parser.add_argument("--model", default=BUILTIN_MODEL, help=f"(default: {BUILTIN_MODEL})")
    parser.add_argument("--dtype", default="auto", help="of the servers (default: auto)")
    parser.add_argument("--quantization", default="none", help="of the servers (default: none)")
    parser.add_argument("--kv-cache-dtype", default="auto", help="of the servers (default: auto)")
    parser.add_argument("--worker-threads", type=int, help="of each server (default: its own)")
    parser.add_argument("--tokens", type=int, default=8000, help="of the prefix")
    parser.add_argument("--turns", type=int, default=1, help="of the restart; 0: none")
    parser.add_argument("--streams", type=int, default=64, help="of the crash; 0: none")
    parser.add_argument("--prompt-tokens", type=int, default=128, help="of each stream")
    parser.add_argument("--max-tokens", type=int, default=64, help="of each stream")
    parser.add_argument("--min-ratio", type=float, default=10.0, help="(default: 10)")
    args = parser.parse_args()
    flags: dict[str, Any] = {"max_total_tokens": 32_768, "dtype": args.dtype}
    flags |= {"quantization": args.quantization, "kv_cache_dtype": args.kv_cache_dtype}
    flags |= {"worker_threads": args.worker_threads} if args.worker_threads else {}
    ratios, is_equal = [args.min_ratio], True
    if args.turns:
        print(f"first request on a prefix of {args.tokens} tokens, in seconds\n")
        print("| turn | first server | restarted, without | with | ratio | loaded | equal tokens |")
        print("|---|---|---|---|---|---|---|")
        ratios += [measure_restart(args, flags, turn) for turn in range(args.turns)]
        print()
    if args.streams:
        is_equal = measure_crash(args, flags)
    sys.exit(EXIT_TOO_SLOW if min(ratios) < args.min_ratio or not is_equal else 0)


if __name__ == "__main__":
    main()
