"""Measure drafts of the model itself: `python -m bench.speculation.drafts --quantization int8`.

One worker in this process answers chats with 0, 1, 2, … drafts in each step, in turns. The table
has the CPU time for a token without drafts over that with them, and the share of right drafts. With
one thread CPU time says what wall time says on a quiet machine, also where others keep it busy.
"""

import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from bench.command import EXIT_OK, command_parser, run_command
from bench.report.markdown import markdown_table
from bench.speculation.loads import tasks_of
from quadriga.config.model_args import BUILTIN_MODEL
from quadriga.config.server_config import ServerConfig
from quadriga.model_files.resolve import resolve_model
from quadriga.model_files.tokenizer import load_tokenizer
from quadriga.wire.messages.arrays import pack_ids, unpack_ids
from quadriga.wire.messages.worker import DECODE, EXTEND, NewSlot, StepPlan
from worker_proc.runner import Runner
from worker_proc.speculation.self_draft import SelfDrafter
from worker_proc.startup.build import make_runner

PAGES = 32  # of an answer with its prompt


@dataclass(frozen=True, slots=True)
class DraftedAnswer:
    """An answer: CPU seconds for a token, drafts, and how many of them were right."""

    token_s: float
    num_drafts: int
    num_right: int
    token_ids: list[int]


def answer(
    runner: Runner, prompt: list[int], num_tokens: int, count: int, temperature: float
) -> DraftedAnswer:
    """Answer one prompt with `count` drafts in each decode step."""
    runner.table.release_all()
    new = NewSlot(0, pack_ids(prompt), 0, pack_ids(range(PAGES)), temperature, -1, 1.0, 0)
    slot, one = pack_ids([0]), pack_ids([1])
    result = runner.run(StepPlan(0, EXTEND, slot, pack_ids([len(prompt)]), [new], b""))
    token_ids, num_drafts, num_right = [*unpack_ids(result.token_ids)], 0, 0
    numbers = pack_ids([count]) if count else b""
    began_at = time.process_time()
    while len(token_ids) < num_tokens:
        result = runner.run(StepPlan(1, DECODE, slot, one, [], b"", num_guesses=numbers))
        token_ids += unpack_ids(result.token_ids)
        for row in result.guessed:
            further = unpack_ids(row.token_ids)
            token_ids += further
            num_drafts, num_right = num_drafts + row.num_guesses, num_right + len(further)
    token_s = (time.process_time() - began_at) / (len(token_ids) - 1)
    return DraftedAnswer(token_s, num_drafts, num_right, token_ids[:num_tokens])


def measure(config: ServerConfig, turns: int, num_tokens: int, temperature: float) -> str:
    """Return the table in markdown."""
    torch.set_num_threads(1)
    files = resolve_model(config.model)
    runner = make_runner(config, files)
    assert runner.engine.draft is not None
    runner.guesser = SelfDrafter(runner.table, runner.engine.draft)
    tokenizer = load_tokenizer(files.tokenizer_dir)
    answers: dict[int, list[DraftedAnswer]] = {count: [] for count in range(6)}
    for turn in range(turns):
        (task,) = tasks_of("chat", 1, turn, num_tokens)
        prompt = list(tokenizer.encode(task.question).ids)
        for count, of_count in answers.items():
            of_count.append(answer(runner, prompt, num_tokens, count, temperature))
    plain = answers.pop(0)
    rows = []
    for count, of_count in answers.items():
        ratios = [a.token_s / b.token_s for a, b in zip(plain, of_count, strict=True)]
        right, drafts = (
            sum(one.num_right for one in of_count),
            sum(one.num_drafts for one in of_count),
        )
        equal = sum(a.token_ids == b.token_ids for a, b in zip(plain, of_count, strict=True))
        spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
        rows.append((
            str(count), f"{statistics.median(ratios):.2f} ({spread})", f"{right / drafts:.0%}",
            f"{equal} of {turns}",
        ))  # fmt: skip
    return markdown_table(("drafts a step", "ratio", "right", "equal answers"), rows)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, and return the exit code."""
    parser = command_parser("bench.speculation.drafts", __doc__)
    parser.add_argument("--model", default=BUILTIN_MODEL)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantization", default="none")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--max-tokens", type=int, default=64)
    args = parser.parse_args(argv)
    config = ServerConfig().replace(
        model=args.model, dtype=args.dtype, quantization=args.quantization, device="cpu",
        max_total_tokens=2048, max_running_requests=1, speculative_method="self",
    )  # fmt: skip

    def run() -> int:
        print(measure(config, args.turns, args.max_tokens, args.temperature))
        return EXIT_OK

    return run_command("bench.speculation.drafts", run)


if __name__ == "__main__":
    sys.exit(main())
