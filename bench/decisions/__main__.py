"""Ask a model questions with known answers, and measure what many questions cost.

    python -m bench.decisions                                   # the built-in model
    python -m bench.decisions --turns 0 -- --model DIRECTORY    # the answers alone
    python -m bench.decisions --state-tokens 4000 -- --dtype float32

A server is started with the flags after `--`. First `questions.json`: 50 questions about ten short
texts; an answer is right if the likeliest label is the known one. Then one question and many, of at
most 60 tokens with their labels, in turns, each about a new state. A ratio is that of the times of
one turn; the exit code is 1 if the median is above --max-ratio.
"""

import argparse
import asyncio
import itertools
import json
import random
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench.cli.command import EXIT_FAILED, EXIT_OK, command_parser, run_command, run_until_signal
from bench.client.server import serving
from bench.load.natural import PASSAGES
from bench.report.table import FigureRow, add_json_flag, show
from bench.turns import Ratios, split_common
from quadriga.client import AsyncClient
from quadriga.client.decisions import Question

QUESTIONS = Path(__file__).with_name("questions.json")
MAX_QUESTION_TOKENS = 60
PREDICATE, CHOICE, SCORE = "predicate", "choice", "score"


class KnownAnswer(NamedTuple):
    """A question about a state, and the right label."""

    kind: str
    question: Question
    answer: str


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command, and return the exit code."""
    own, server_flags = split_common(sys.argv[1:] if argv is None else argv)
    parser = command_parser("bench.decisions", __doc__)
    parser.add_argument("--turns", type=int, default=6, metavar="N",
                        help="of the timing; 0: none (default: 6)")  # fmt: skip
    parser.add_argument("--num-questions", type=int, default=20, metavar="N",
                        help="that are compared with one (default: 20)")  # fmt: skip
    parser.add_argument("--state-tokens", type=int, default=2000, metavar="N",
                        help="of the timing (default: 2000)")  # fmt: skip
    parser.add_argument("--max-ratio", type=float, default=2.0, metavar="X",
                        help="of the times of many and one (default: 2)")  # fmt: skip
    add_json_flag(parser)
    arguments = parser.parse_args(own)
    work = _measure(arguments, server_flags)
    return run_command("bench.decisions", lambda: run_until_signal(work))


def known_answers() -> list[tuple[str, list[KnownAnswer]]]:
    """Return the states of the file, each with its questions."""
    return [
        (each["state"], [_known(question) for question in each["questions"]])
        for each in json.loads(QUESTIONS.read_text())
    ]


def _known(given: dict[str, Any]) -> KnownAnswer:
    labels = given.get("labels", given.get("levels", ()))
    kind = CHOICE if "labels" in given else SCORE if "levels" in given else PREDICATE
    return KnownAnswer(kind, Question(given["ask"], labels), given["answer"])


async def _measure(arguments: argparse.Namespace, server_flags: Sequence[str]) -> int:
    async with serving(server_flags) as (own, info), AsyncClient(own.endpoint) as client:
        name = f"{info['model']} in {info['dtype']}"
        show(f"right answers, {name}", await _right_answers(client), arguments.json)
        if not arguments.turns:
            return EXIT_OK
        ratios, rows = await _times(client, arguments)
        title = (
            f"seconds for questions about a state of {arguments.state_tokens} tokens, {name};"
            f" ratio {ratios}"
        )
        show(title, rows, arguments.json)
    return EXIT_OK if ratios.median <= arguments.max_ratio else EXIT_FAILED


async def _right_answers(client: AsyncClient) -> list[FigureRow]:
    """Return for each kind of question how many answers are right, and the mean label mass."""
    rights: dict[str, list[bool]] = {}
    masses: dict[str, list[float]] = {}
    for state, known in known_answers():
        decisions = await client.decide(state, [each.question for each in known])
        for each, decision in zip(known, decisions, strict=True):
            for kind in (each.kind, "all"):
                rights.setdefault(kind, []).append(decision.label == each.answer)
                masses.setdefault(kind, []).append(decision.label_mass)
    return [
        {
            "questions": kind,
            "number": len(rights[kind]),
            "right": sum(rights[kind]),
            "label mass": statistics.mean(masses[kind]),
        }
        for kind in (PREDICATE, CHOICE, SCORE, "all")
    ]


async def _times(
    client: AsyncClient, arguments: argparse.Namespace
) -> tuple[Ratios, list[FigureRow]]:
    """Return the ratios of the times of many questions and of one, and a row for both."""
    all_questions = [each.question for _, known in known_answers() for each in known]
    short = [
        each for each in all_questions if await _num_tokens(client, each) <= MAX_QUESTION_TOKENS
    ]
    many = list(itertools.islice(itertools.cycle(short), arguments.num_questions))
    seconds: dict[int, list[float]] = {1: [], len(many): []}
    for turn in range(-1, arguments.turns):  # the first one warms up
        counts = list(seconds) if turn % 2 else list(seconds)[::-1]
        for count in counts:
            # One question is another one in each turn.
            questions = many if count > 1 else [many[turn % len(many)]]
            state = await _state(client, arguments.state_tokens, seed=2 * turn + (count > 1))
            began = time.perf_counter()
            await client.decide(state, questions)
            if turn >= 0:
                seconds[count].append(time.perf_counter() - began)
            await asyncio.sleep(0)
    rows: list[FigureRow] = [
        {"questions": count, "seconds": statistics.median(values), "from": min(values),
         "to": max(values)}
        for count, values in seconds.items()
    ]  # fmt: skip
    pairs = zip(seconds[len(many)], seconds[1], strict=True)
    return Ratios([of_many / of_one for of_many, of_one in pairs]), rows


async def _num_tokens(client: AsyncClient, question: Question) -> int:
    """Return the number of tokens of a question with its labels, as its writer counts them."""
    labels = question.labels
    listed = (
        [f"{label}: {why}" for label, why in labels.items()] if isinstance(labels, dict) else labels
    )
    return len(await client.tokenize("\n".join([question.instructions, *listed])))


async def _state(client: AsyncClient, num_tokens: int, seed: int) -> str:
    """Return a text of about so many tokens that begins like no other one."""
    draw = random.Random(f"{seed}/state")
    text = f"Report {draw.randrange(10**6)}.\n"
    while len(ids := await client.tokenize(text)) < num_tokens:
        text += draw.choice(PASSAGES) + "\n"
    return await client.detokenize(ids[:num_tokens])


if __name__ == "__main__":
    sys.exit(main())
