"""How near the worker comes to what this machine allows: `python -m bench.roofline --model MODEL`.

Measures how fast memory is read and how fast matrices of the model's shapes are multiplied, works
out the least time of a step (bench/roofline/roofline_model.py), runs steps of the real worker in
this process, and prints both. Ends with 1 where a step takes longer
than its bound. Takes the flags of a server.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from bench.roofline.roofline_model import Product, StepPart, Work, at_the_rate, floor
from bench.worker_steps import make_bench
from quadriga.config import server_config as server_flags
from quadriga.config.server_config import ServerConfig
from quadriga.errors import ConfigError, QuadrigaError
from quadriga.model_files.resolve import resolve_model

if TYPE_CHECKING:
    from bench.roofline.steps import Kind, MeasuredRound

if TYPE_CHECKING:  # these need torch, which make_bench imports when everything is set for it
    from bench.roofline.steps import Kind

BATCHES, CONTEXTS, PREFILLS = (1, 8, 32, 64), (128, 1024), (128, 512)
ROOM = 64
"""A context ends so many tokens before the model's own does."""
MIN_CONTEXT = max(PREFILLS) + ROOM
TOKENS_A_ROW = max(CONTEXTS) + 32
ONE_ROW_BOUND, ROWS_BOUND = 1.15, 1.25
"""A decode step takes at most so many times the floor."""
PREFILL_BOUND = 0.7
"""Share of the matmul rate."""
EXIT_OK, EXIT_MISSED, EXIT_USAGE = 0, 1, 2


@dataclass(frozen=True, slots=True)
class Line:
    """One kind of step: medians. Machines are faster at one time than at another, so that each
    round has a floor of its own.

    least: ms of each part of the floor. ratio: of step to floor. share: of the step that its
    products would take at the matmul rate. parts: ms of each part, {} where the engine does not
    tell. decode_rows: None for a prefill.
    """

    name: str
    ms: float
    least: Mapping[StepPart, float]
    ratio: float
    share: float
    parts: Mapping[str, float]
    decode_rows: int | None

    @property
    def bound(self) -> str:
        if self.decode_rows is None:
            return f"rate >= {PREFILL_BOUND:.0%}"
        return f"ratio <= {self._ratio_bound}"

    @property
    def holds(self) -> bool:
        if self.decode_rows is None:
            return self.share >= PREFILL_BOUND
        return self.ratio <= self._ratio_bound

    @property
    def _ratio_bound(self) -> float:
        return ONE_ROW_BOUND if self.decode_rows == 1 else ROWS_BOUND


def line_of(kind: "Kind", rounds: "Sequence[MeasuredRound]", work: Work) -> Line:
    case = kind.case()
    floors = [floor(work, case, round.speed) for round in rounds]
    ms = [median(step.ms for step in round.steps) for round in rounds]
    told = [step.parts for round in rounds for step in round.steps]
    return Line(
        name=str(kind),
        ms=median(step.ms for round in rounds for step in round.steps),
        least={part: 1000 * median(least[part] for least in floors) for part in StepPart},
        ratio=median(
            one / (1000 * sum(least.values())) for one, least in zip(ms, floors, strict=True)
        ),
        share=median(
            1000 * at_the_rate(work, case, round.speed) / one
            for one, round in zip(ms, rounds, strict=True)
        ),
        parts={name: median(parts[name] for parts in told) for name in told[0]},
        decode_rows=kind.rows if kind.decodes else None,
    )


# --- what is printed ------------------------------------------------------------------------------


def step_table(lines: Sequence[Line]) -> str:
    rows = [
        (
            line.name,
            f"{line.ms:.2f}",
            f"{sum(line.least.values()):.2f}",
            f"{line.ratio:.2f}",
            f"{line.share:.0%}",
            f"{line.bound}: {'holds' if line.holds else 'MISSED'}",
        )
        for line in lines
    ]
    return _table(("step", "ms", "floor, ms", "ratio", "of the matmul rate", "bound"), rows)


def part_table(lines: Sequence[Line]) -> str:
    """ms of each part, and behind it the floor where the part has one."""
    names = list(lines[0].parts)
    rows = []
    for line in lines:
        least = {part.value: ms for part, ms in line.least.items()}
        cells = [
            f"{line.parts[name]:.2f}" + (f" ({least[name]:.2f})" if name in least else "")
            for name in names
        ]
        rows.append((line.name, *cells))
    return _table(("ms (floor)", *names), rows)


def rate_table(rates: Mapping[Product, Mapping[str, float]]) -> str:
    ways = list(next(iter(rates.values())))
    rows = [
        (f"{p.inputs} x {p.outputs}", *(f"{by_way[way] / 1e9:.0f}" for way in ways))
        for p, by_way in rates.items()
    ]
    return _table(("GFLOP/s, --attention-backend", *ways), rows)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


# --- the command line -----------------------------------------------------------------------------


def kinds_for(context_length: int) -> "list[Kind]":
    """The steps that are run; a model of a shorter context has its longest decodes there."""
    from bench.roofline.steps import Kind

    contexts = dict.fromkeys(min(context, context_length - ROOM) for context in CONTEXTS)
    kinds = [Kind(rows, context) for context in contexts for rows in BATCHES]
    return kinds + [Kind(1, 0, tokens) for tokens in PREFILLS]


def report(config: ServerConfig) -> bool:
    """Measure and print; whether every bound holds. ConfigError for what cannot be measured."""
    if config.worker.quantization == "gguf":
        raise ConfigError(
            "quantization gguf keeps matrices at several sizes, and the floor is worked out with"
            " one for all: take int8 or int4"
        )
    files = resolve_model(config.model, show_progress=True)
    if files.context_length < MIN_CONTEXT:
        raise ConfigError(
            f"the context is {files.context_length} tokens: the steps that are measured need"
            f" {MIN_CONTEXT}; take another model, or leave --context-length out"
        )
    bench, machine = make_bench(config, TOKENS_A_ROW)
    if machine.device != "cpu":
        raise ConfigError(f"device is {machine.device}: this is about a cpu; add --device cpu")
    from bench.roofline.machine_speed import ProductSpeed, ReadSpeed
    from bench.roofline.model_work import work_of
    from bench.roofline.steps import measure

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
    """Exit codes: 0 every bound holds, 1 one does not, 2 bad flags or no model."""
    parser = argparse.ArgumentParser("python -m bench.roofline", description=__doc__)
    parser.add_argument(
        "--report-only", action="store_true", help="end with 0 whether or not the bounds hold"
    )
    server_flags.add_flags(parser)
    arguments = parser.parse_args(argv)
    try:
        holds = report(server_flags.from_namespace(arguments))
    except QuadrigaError as error:
        print(f"bench.roofline.command: {error}", file=sys.stderr)
        return EXIT_USAGE
    return EXIT_OK if holds or arguments.report_only else EXIT_MISSED
