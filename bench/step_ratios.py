"""Compare the worker's steps in two checkouts: `python -m bench.step_ratios OTHER -- FLAGS`.

Each checkout computes in a process of its own, and they take turns, step by step, so that a slow
minute of the machine affects both. A ratio is tokens/s of this checkout over those of the other:
below 1, this one is slower. For example

    git worktree add ../before HEAD~1
    python -m bench.step_ratios ../before -- --quantization int8

With --worker-threads 1, times are those of the CPU instead of the clock, which other programs
change less. With more threads a thread that waits for another one would count, too.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

NUM_ROUNDS, STEPS_A_TURN = 20, 4
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
def running(root: Path, flags: Sequence[str]) -> Iterator[Checkout]:
    """Run the worker of a checkout."""
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__).resolve()), CHILD, *flags],
        env={**os.environ, "PYTHONPATH": str(root.resolve())},
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


def compare(other: Path, flags: Sequence[str]) -> None:
    """Print the ratio of each kind of step."""
    times: dict[StepKind, tuple[list[float], list[float]]] = {kind: ([], []) for kind in KINDS}
    with ExitStack() as stack:
        roots = (Path(__file__).resolve().parent.parent, other)
        checkouts = [stack.enter_context(running(root, flags)) for root in roots]
        for turn in range(NUM_ROUNDS):
            for number, kind in enumerate(KINDS):
                for side in ((0, 1), (1, 0))[turn % 2]:
                    times[kind][side].extend(checkouts[side].ask(str(number)))
    print("| step | this, ms | other, ms | tokens/s, least | median |\n|---|---|---|---|---|")
    for kind, (ours, theirs) in times.items():
        best = min(theirs) / min(ours)
        median = statistics.median(theirs) / statistics.median(ours)
        least = f"{min(ours):.2f} | {min(theirs):.2f}"
        print(f"| {kind} | {least} | {best:.3f} | {median:.3f} |")


if __name__ == "__main__":
    if sys.argv[1:2] == [CHILD]:
        sys.path.pop(0)  # the folder of this file, which comes before the checkout
        serve(sys.argv[2:])
    elif len(sys.argv) < 2 or not Path(sys.argv[1], "worker_proc").is_dir():
        raise SystemExit(__doc__)
    else:
        compare(Path(sys.argv[1]), [flag for flag in sys.argv[2:] if flag != "--"])
