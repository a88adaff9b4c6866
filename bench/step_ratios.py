"""Compare the worker's steps of two checkouts, or with other flags.

    git worktree add ../before HEAD~1
    python -m bench.step_ratios "before: @../before" "now: " -- --quantization int8

Variants are written as in bench.compare. Each computes in a process of its own, and they take
turns, a few steps each. A ratio is the time of a step over that of the first variant: above 1, the
variant is slower.

With --worker-threads 1, times are those of the CPU instead of the clock, which other programs
change less. With more threads a thread that waits for another one would count, too.
"""

import argparse
import json
import operator
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from bench.turns import Variant

NUM_TURNS, STEPS_A_TURN = 20, 4
NUM_TOKENS_A_ROW = 640
CHILD = "--child"


class StepKind(NamedTuple):
    """A step of `rows` rows, each of `tokens` tokens after a context."""

    rows: int
    context: int
    tokens: int = 1

    def __str__(self) -> str:
        name = f"{self.rows} rows" if self.tokens == 1 else f"a prompt of {self.tokens} tokens"
        return f"{name}, {self.context} before"


KINDS = (
    StepKind(1, 300),
    StepKind(8, 300),
    StepKind(64, 300),
    StepKind(1, 1900),
    StepKind(8, 1900),
    StepKind(1, 0, 64),
    StepKind(1, 0, 512),
    StepKind(1, 1500, 512),
)


def serve(flags: Sequence[str]) -> None:
    """Load the model, then answer each line, the number of a kind, with the ms of some steps."""
    from bench.worker_steps import Row, make_bench
    from quadriga.server.config import server_config

    parser = argparse.ArgumentParser("the worker's flags", allow_abbrev=False)
    server_config.add_flags(parser)
    config = server_config.from_namespace(parser.parse_args(flags))
    bench, _ = make_bench(config, NUM_TOKENS_A_ROW)
    print("[]", flush=True)
    for line in sys.stdin:
        kind = KINDS[int(line)]
        case = (Row(kind.context, kind.tokens),) * kind.rows
        times = []
        for _ in range(STEPS_A_TURN):
            with bench.prepared(case) as step:
                began_at = time.process_time()
                wall_ms = step()
                cpu_ms = 1000 * (time.process_time() - began_at)
            times.append(cpu_ms if config.worker.worker_threads == 1 else wall_ms)
        print(json.dumps(times), flush=True)


class Checkout:
    """A checkout of the project, whose worker computes steps."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process
        self.ask("")

    def ask(self, line: str) -> list[float]:
        """Send a line unless it is empty, and return what the worker measured."""
        source, sink = self._process.stdin, self._process.stdout
        assert source is not None
        assert sink is not None
        if line:
            source.write(f"{line}\n")
            source.flush()
        answer = sink.readline()
        if not answer:
            raise SystemExit("bench.step_ratios: a worker has ended, as it says above")
        times: list[float] = json.loads(answer)
        return times


@contextmanager
def running(variant: "Variant", common: Sequence[str]) -> Iterator[Checkout]:
    """Run the worker of a variant's checkout."""
    root = variant.checkout
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__).resolve()), CHILD, *common, *variant.flags],
        env={**os.environ, "PYTHONPATH": str(root)},
        cwd=root,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield Checkout(process)
    finally:
        process.kill()
        process.communicate()


def compare(argv: Sequence[str]) -> None:
    """Print the median ms of each kind of step, and the ratio turn by turn."""
    # Not imported by a worker, whose checkout may be older than these modules.
    from statistics import median

    from bench.turns import Column, Turns, split_common, variant_of

    named, common = split_common(argv)
    variants = {variant.name: variant for variant in map(variant_of, named)}
    turns: Turns[Mapping[StepKind, float]] = Turns(list(variants))
    with ExitStack() as stack:
        workers = {name: stack.enter_context(running(v, common)) for name, v in variants.items()}
        for _, name in turns.order(NUM_TURNS):
            times = [median(workers[name].ask(str(number))) for number in range(len(KINDS))]
            turns.results[name].append(dict(zip(KINDS, times, strict=True)))
    columns: list[Column[Mapping[StepKind, float]]] = [
        Column(str(kind), operator.itemgetter(kind), 2, has_ratio=True) for kind in KINDS
    ]
    print(turns.table(columns, "ms a step"))


def main() -> int:
    """Compare the variants of the command line, and return the exit code."""
    from bench.cli.command import EXIT_OK, EXIT_USAGE, run_command

    if not {"--help", "-h"}.isdisjoint(sys.argv) or len(sys.argv) < 2:
        print(__doc__)
        return EXIT_OK if len(sys.argv) > 1 else EXIT_USAGE

    def work() -> int:
        compare(sys.argv[1:])
        return EXIT_OK

    return run_command("bench.step_ratios", work)


if __name__ == "__main__":
    if sys.argv[1:2] == [CHILD]:
        sys.path.pop(0)  # the folder of this file, which comes before the checkout
        serve(sys.argv[2:])
    else:
        sys.exit(main())
