"""Compare the worker with this machine's roofline: `python -m bench.roofline --model MODEL`.

Measures the speed of memory and of matrix products of the model's shapes, computes the minimum time
of each step (bench/roofline/roofline_model.py), runs steps of the real worker in this process, and
prints both. Takes the flags of a server. The exit code is 1 if a step exceeds its bound.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from bench.cli.command import EXIT_FAILED, EXIT_OK, EXIT_USAGE, command_parser, run_command
from bench.report.table import markdown_table
from bench.roofline.roofline_model import Product, StepPart, Work, at_the_rate, floor
from bench.worker_steps import make_bench
from quadriga.errors import ConfigError
from quadriga.server.config import server_config
from quadriga.server.config import server_config as server_flags
from quadriga.server.models.resolve import resolve_model

if TYPE_CHECKING:  # needs torch, which make_bench imports after it has set the environment
    from bench.roofline.machine_speed import Kind, MeasuredRound

BATCHES, CONTEXTS, PREFILLS = (1, 8, 32, 64), (128, 1024), (128, 512)
# Contexts end this many tokens before the model's own context.
CONTEXT_MARGIN_TOKENS = 64
MIN_CONTEXT_TOKENS = max(PREFILLS) + CONTEXT_MARGIN_TOKENS
MAX_ROW_TOKENS = max(CONTEXTS) + 32
MAX_RATIO_ONE_ROW, MAX_RATIO = 1.15, 1.25  # of a decode step to its floor
MIN_PREFILL_SHARE = 0.7  # of the matmul rate


@dataclass(frozen=True, slots=True)
class Line:
    """Medians of one kind of step; each round has its own floor, as the machine's speed varies.

    Attributes:
        ms: duration of the step.
        floor_ms: each part of the floor.
        ratio: step to floor.
        share: share of the step that its products would take at the matmul rate.
        parts: ms of each part; empty if the engine does not time them.
        decode_rows: None for a prefill.
    """

    name: str
    ms: float
    floor_ms: Mapping[StepPart, float]
    ratio: float
    share: float
    parts: Mapping[str, float]
    decode_rows: int | None

    @property
    def bound(self) -> str:
        """The bound as a text."""
        if self.decode_rows is None:
            return f"rate >= {MIN_PREFILL_SHARE:.0%}"
        return f"ratio <= {self._ratio_bound}"

    @property
    def holds(self) -> bool:
        """Whether the step is within its bound."""
        if self.decode_rows is None:
            return self.share >= MIN_PREFILL_SHARE
        return self.ratio <= self._ratio_bound

    @property
    def _ratio_bound(self) -> float:
        return MAX_RATIO_ONE_ROW if self.decode_rows == 1 else MAX_RATIO


def line_of(kind: "Kind", rounds: "Sequence[MeasuredRound]", work: Work) -> Line:
    """Return the medians of a kind of step."""
    case = kind.case()
    floors = [floor(work, case, measured.speed) for measured in rounds]
    ms = [median(step.ms for step in measured.steps) for measured in rounds]
    steps = [step for measured in rounds for step in measured.steps]
    return Line(
        name=str(kind),
        ms=median(step.ms for step in steps),
        floor_ms={part: 1000 * median(least[part] for least in floors) for part in StepPart},
        ratio=median(
            step_ms / (1000 * sum(least.values()))
            for step_ms, least in zip(ms, floors, strict=True)
        ),
        share=median(
            1000 * at_the_rate(work, case, measured.speed) / step_ms
            for step_ms, measured in zip(ms, rounds, strict=True)
        ),
        parts={name: median(step.parts[name] for step in steps) for name in steps[0].parts},
        decode_rows=kind.rows if kind.decodes else None,
    )


# --- tables ---------------------------------------------------------------------------------------


def step_table(lines: Sequence[Line]) -> str:
    """Return the table of steps with floor, ratio and bound."""
    rows = [
        (
            line.name,
            f"{line.ms:.2f}",
            f"{sum(line.floor_ms.values()):.2f}",
            f"{line.ratio:.2f}",
            f"{line.share:.0%}",
            f"{line.bound}: {'holds' if line.holds else 'MISSED'}",
        )
        for line in lines
    ]
    return markdown_table(("step", "ms", "floor, ms", "ratio", "of the matmul rate", "bound"), rows)


def part_table(lines: Sequence[Line]) -> str:
    """Return the table of each part's ms, with its floor in brackets."""
    names = list(lines[0].parts)
    rows = []
    for line in lines:
        least = {part.value: ms for part, ms in line.floor_ms.items()}
        cells = [
            f"{line.parts[name]:.2f}" + (f" ({least[name]:.2f})" if name in least else "")
            for name in names
        ]
        rows.append((line.name, *cells))
    return markdown_table(("ms (floor)", *names), rows)


def rate_table(rates: Mapping[Product, Mapping[str, float]]) -> str:
    """Return the table of matmul rates by engine."""
    ways = list(next(iter(rates.values())))
    rows = [
        (f"{p.inputs} x {p.outputs}", *(f"{by_way[way] / 1e9:.0f}" for way in ways))
        for p, by_way in rates.items()
    ]
    return markdown_table(("GFLOP/s, --attention-backend", *ways), rows)


# --- the command line -----------------------------------------------------------------------------


def kinds_for(context_length: int) -> "list[Kind]":
    """Return the kinds of steps to run, with contexts within the model's."""
    from bench.roofline.machine_speed import Kind

    contexts = dict.fromkeys(
        min(context, context_length - CONTEXT_MARGIN_TOKENS) for context in CONTEXTS
    )
    kinds = [Kind(rows, context) for context in contexts for rows in BATCHES]
    return kinds + [Kind(1, 0, tokens) for tokens in PREFILLS]


def report(config: server_config.ServerConfig) -> bool:
    """Measure and print, and return whether every bound holds, or raise ConfigError."""
    if config.worker.quantization == "auto":
        config = config.replace(quantization="none")
    if config.worker.quantization == "gguf":
        raise ConfigError(
            "quantization gguf has matrices of several formats, and the floor is computed with"
            " one for all: take int8 or int4"
        )
    files = resolve_model(config.model, show_progress=True)
    if files.context_length < MIN_CONTEXT_TOKENS:
        raise ConfigError(
            f"the context is {files.context_length} tokens: the steps that are measured need"
            f" {MIN_CONTEXT_TOKENS}; take another model, or leave --context-length out"
        )
    bench, machine = make_bench(config, MAX_ROW_TOKENS)
    if machine.device != "cpu":
        raise ConfigError(
            f"device is {machine.device}: the roofline is that of a cpu; add --device cpu"
        )
    from bench.roofline.machine_speed import ProductSpeed, ReadSpeed, measure
    from bench.roofline.model_work import work_of

    dtype = bench.runner.dtype
    work = work_of(files.config, config.worker.quantization, dtype.itemsize)
    reads = ReadSpeed(config.worker, dtype)
    products = ProductSpeed(work.products, config.worker, dtype)
    bench.fill()
    measured = measure(bench, kinds_for(files.context_length), reads, products)

    lines = [line_of(kind, rounds, work) for kind, rounds in measured.items()]
    speeds = sorted(r.speed.bytes_per_s / 1e9 for rounds in measured.values() for r in rounds)
    print(
        f"{machine.model}, {machine.dtype}, {machine.threads} threads: memory is read at"
        f" {median(speeds):.1f} GB/s ({speeds[0]:.1f} to {speeds[-1]:.1f})\n"
    )
    tables = [rate_table(products.medians()), step_table(lines)]
    if all(line.parts for line in lines):
        tables.append(part_table(lines))
    print("\n\n".join(tables))
    return all(line.holds for line in lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, and return the exit code: 0 bounds hold, 1 otherwise, 2 bad flags or no model."""
    parser = command_parser("bench.roofline", __doc__)
    parser.add_argument(
        "--report-only", action="store_true", help="exit with 0 even if a bound does not hold"
    )
    server_flags.add_flags(parser)
    arguments = parser.parse_args(argv)
    return run_command(
        "bench.roofline",
        lambda: _main(server_flags.from_namespace(arguments), arguments.report_only),
        on_failure=EXIT_USAGE,
    )


def _main(config: server_config.ServerConfig, report_only: bool) -> int:
    holds = report(config)
    return EXIT_OK if holds or report_only else EXIT_FAILED


if __name__ == "__main__":
    sys.exit(main())
