"""Measure what guessed tokens save.

    python -m bench.speculation --streams 1,4,8,32 --turns 3

Two servers run, one of them with --speculative-method; a server that waits takes no CPU time. They
get the same load in turns, so that a slow minute affects both. The table has the median over the
turns of the ratio of tokens per second, with and without guesses, and the smallest and the largest
one; how many of the guessed tokens were right; and the tokens of a row and step. The exit code is
1 if a median is below --min-ratio.
"""

import statistics
import sys
import time
from typing import Any, NamedTuple

from bench.command import command_parser
from bench.speculation.loads import LOADS, GuessTask, tasks_of
from quadriga.config.model_args import BUILTIN_MODEL
from quadriga.llm.llm import LLM

EXIT_SLOWER = 1


class TimedRun(NamedTuple):
    """One load on one server.

    Attributes:
        rate: tokens per second.
        texts: the answers.
        guesses: rows with guesses, guessed tokens, and right ones.
    """

    rate: float
    texts: list[str]
    guesses: tuple[int, int, int]


def run(llm: LLM, tasks: list[GuessTask]) -> TimedRun:
    """Send all tasks at once, and wait for the answers."""
    before = guesses_of(llm)
    chats = [[{"role": "user", "content": task.question}] for task in tasks]
    began_at = time.perf_counter()
    answers = llm.chat(chats, [task.params for task in tasks])
    took_s = time.perf_counter() - began_at
    num_tokens = sum(answer.usage.completion_tokens for answer in answers)
    after = guesses_of(llm)
    rows, guessed, right = (end - begin for begin, end in zip(before, after, strict=True))
    return TimedRun(
        num_tokens / took_s, [answer.text for answer in answers], (rows, guessed, right)
    )


def guesses_of(llm: LLM) -> list[int]:
    """Return the server's counters of rows with guesses, guesses and right guesses."""
    info: dict[str, Any] = llm.client.info()
    names = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
    return [info.get(f"spec_decode_{name}_total", 0) for name in names]


def measure(plain: LLM, guessing: LLM, load: str, streams: int, turns: int, tokens: int) -> float:
    """Run a load in turns, print its line, and return the median ratio."""
    ratios, rates, num_equal, num_tasks, guesses = [], [], 0, 0, [0, 0, 0]
    for turn in range(turns):
        tasks = tasks_of(load, streams, turn, tokens)
        first, second = (plain, guessing) if turn % 2 else (guessing, plain)
        runs = {llm: run(llm, tasks) for llm in (first, second)}
        ratios.append(runs[guessing].rate / runs[plain].rate)
        rates.append(runs[plain].rate)
        guesses = [a + b for a, b in zip(guesses, runs[guessing].guesses, strict=True)]
        pairs = zip(runs[guessing].texts, runs[plain].texts, strict=True)
        num_equal += sum(one == other for one, other in pairs)
        num_tasks += streams
    rows, guessed, right = guesses
    ratio = statistics.median(ratios)
    print(
        f"| {load} | {streams} | {statistics.median(rates):.0f} | {ratio:.2f} ({min(ratios):.2f} to"
        f" {max(ratios):.2f}) | {100 * right / max(guessed, 1):.0f} % of {guessed} |"
        f" {1 + right / max(rows, 1):.1f} | {num_equal} of {num_tasks} |",
        flush=True,
    )
    return ratio


def main() -> None:
    """Run the command line."""
    parser = command_parser("bench.speculation", __doc__)
    parser.add_argument("--model", default=BUILTIN_MODEL)
    parser.add_argument("--speculative-method", default="auto", choices=("auto", "ngram", "self"))
    parser.add_argument("--num-speculative-tokens", type=int, default=15)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantization", default="none")
    parser.add_argument("--streams", default="1,4,8,32", help="requests at one time")
    parser.add_argument("--loads", default=",".join(LOADS))
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--min-ratio", type=float, default=0.98)
    args = parser.parse_args()
    common: dict[str, Any] = {"dtype": args.dtype, "quantization": args.quantization}
    guesses: dict[str, Any] = {
        "speculative_method": args.speculative_method,
        "num_speculative_tokens": args.num_speculative_tokens,
    }
    with LLM(args.model, **common) as plain, LLM(args.model, **common, **guesses) as guessing:
        for llm in (plain, guessing):
            run(llm, tasks_of("chat", 1, -1, 16))
        print("| load | streams | tokens/s without | ratio | right | tokens a row | equal texts |")
        print("|---|---|---|---|---|---|---|")
        ratios = [
            measure(plain, guessing, load, int(streams), args.turns, args.max_tokens)
            for load in args.loads.split(",")
            for streams in args.streams.split(",")
        ]
    sys.exit(EXIT_SLOWER if min(ratios) < args.min_ratio else 0)


if __name__ == "__main__":
    main()
