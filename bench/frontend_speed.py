"""Measure what a server can do whose workers compute nothing.

    python -m bench.frontend_speed --replicas 1 2 4 8

Each step of a worker sleeps for --step-ms, as if a GPU computed it; all other processes are the
real ones. With --streams for each replica they can deliver replicas * streams / step-ms tokens. The
table has the tokens per second, the share of what one replica's rate promises, and the CPU time of
each kind of process for a token. One frontend serves all replicas, so that 1 s over its CPU time
for a token is the most tokens per second that it can deliver, with a core of its own. Exit codes: 0
all requests finished, 1 some failed, 2 bad flags, 3 no server.
"""

import asyncio
import os
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import NamedTuple

from bench import serving
from bench.cli.command import EXIT_FAILED, EXIT_OK, command_parser, run_command
from bench.cli.options import parse
from bench.client.resources import BENCH
from bench.paced_worker import paced_environment
from bench.report.report import Result
from bench.report.table import markdown_table
from quadriga.errors import ConfigError
from quadriga.server.config.engine_args import BUILTIN_MODEL

PROCESSES = ("tokenizer_proc", "scheduler_proc", "detok_proc", "worker_proc", BENCH)
HEADER = (
    "replicas", "tokens/s", "of replicas * one", *(f"{name}, us a token" for name in PROCESSES),
    "busy cores", "a frontend's limit, tokens/s",
)  # fmt: skip
MICRO = 1e6
NUM_ROUNDS, PROMPT_TOKENS = 3, 32


class FrontendRun(NamedTuple):
    """What one number of replicas brought.

    Attributes:
        cpu_s: CPU seconds of each of PROCESSES, over all replicas.
    """

    num_replicas: int
    num_tokens: int
    seconds: float
    cpu_s: Mapping[str, float]
    num_failed: int

    @property
    def tokens_per_s(self) -> float:
        """Delivered tokens per second."""
        return self.num_tokens / self.seconds


def run_of(num_replicas: int, result: Result) -> FrontendRun:
    """Return the figures of a measured run."""
    cpu_s: defaultdict[str, float] = defaultdict(float)
    for name, seconds in result.cost.cpu.items():
        cpu_s[name.partition("/")[0]] += seconds or 0.0
    summary = result.summary
    return FrontendRun(
        num_replicas, summary.completion_tokens, summary.duration, cpu_s, summary.failed
    )


def table(runs: Sequence[FrontendRun]) -> str:
    """Return the runs as a markdown table; the first one is what the others are compared with."""
    each = runs[0].tokens_per_s / runs[0].num_replicas
    rows = []
    for run in runs:
        us = [MICRO * run.cpu_s[name] / run.num_tokens for name in PROCESSES]
        rows.append(
            [
                str(run.num_replicas),
                f"{run.tokens_per_s:.0f}",
                f"{run.tokens_per_s / (each * run.num_replicas):.3f}",
                *(f"{value:.1f}" for value in us),
                f"{sum(run.cpu_s.values()) / run.seconds:.2f}",
                f"{MICRO / us[0]:.0f}" if us[0] else "-",
            ]
        )
    return markdown_table(list(HEADER), rows)


async def measure(
    model: str, num_replicas: int, num_streams: int, num_tokens: int, log: Path
) -> FrontendRun:
    """Start a server, send rounds of streams, and return what they brought."""
    streams = num_replicas * num_streams
    flags = [
        f"--model={model}", f"--dp={num_replicas}", f"--max-running-requests={2 * num_streams}",
        "--speculative-method=none", f"--num-requests={NUM_ROUNDS * streams}",
        f"--max-concurrency={streams}", f"--random-input-len={PROMPT_TOKENS}",
        f"--max-new-tokens={num_tokens}", "--no-stop-on-eos", f"--server-log={log}",
    ]  # fmt: skip
    options = parse(flags)
    async with AsyncExitStack() as stack:
        runs = await serving.open_runs(options, stack)
        await runs.warm_up(0)
        return run_of(num_replicas, await runs.measure(0))


def main(argv: list[str] | None = None) -> int:
    """Run the command line, and return the exit code."""
    parser = command_parser("bench.frontend_speed", __doc__)
    parser.add_argument("--model", default=BUILTIN_MODEL, help="its tokenizer (%(default)s)")
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--streams", type=int, default=64, help="for each replica (%(default)s)")
    parser.add_argument("--step-ms", type=float, default=10.0, help="(%(default)s)")
    parser.add_argument("--max-new-tokens", type=int, default=256, help="(%(default)s)")

    def work() -> int:
        arguments = parser.parse_args(argv)
        sizes = (*arguments.replicas, arguments.streams, arguments.max_new_tokens)
        if min(sizes) < 1 or not arguments.step_ms > 0:
            raise ConfigError(
                "--replicas, --streams, --max-new-tokens and --step-ms must be positive"
            )
        os.environ.update(paced_environment(arguments.step_ms))
        runs = []
        with tempfile.TemporaryDirectory() as folder:
            for count in arguments.replicas:
                print(f"replicas: {count}", file=sys.stderr, flush=True)
                sizes = (arguments.streams, arguments.max_new_tokens)
                log = Path(folder) / "server.log"
                runs.append(asyncio.run(measure(arguments.model, count, *sizes, log)))
        print(table(runs))
        return EXIT_FAILED if any(run.num_failed for run in runs) else EXIT_OK

    return run_command("bench.frontend_speed", work)


if __name__ == "__main__":
    sys.exit(main())
