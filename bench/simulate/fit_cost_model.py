"""Fit a cost model to the real worker: `python -m bench.simulate.fit_cost_model`.

Runs plans of many shapes on a worker in this process, each several times in shuffled order, and
fits their medians by non-negative least squares on the relative error. With --calibrate RUN.json
(of `bench.serving --json`) it runs nothing, and copies the delays outside the steps from a measured
run into an existing model.
"""

import argparse
import random
import shlex
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from bench.cli.command import EXIT_OK, EXIT_USAGE, command_parser, run_command
from bench.report.files import read_runs
from bench.worker_steps import MAX_ROW_TOKENS, MAX_ROWS, Case, Row, WorkerBench, make_bench
from quadriga.server.config import server_config as server_flags
from simulator.cost_model import (
    DEFAULT,
    FEATURES,
    CostModel,
    Delays,
    Features,
    Fit,
    features_of,
    load,
    save,
)

# The plans to which a cost model is fitted, and how long the real worker takes for each.

Floats = npt.NDArray[np.float64]
QUICK_STRIDE = 4
QUICK_ROW_TOKENS = 320  # of the KV pool, for each of MAX_ROWS rows
QUICK_TOKENS = QUICK_ROW_TOKENS * MAX_ROWS * 3 // 4


def design(seed: int = 0) -> list[Case]:
    """Return plans that cover what a server runs.

    Decodes at several widths and contexts, prefills with and without a context, chunks that sample
    nothing, and mixtures.
    """
    source = random.Random(seed)

    def ragged(rows: int, low: int, high: int, prefill: bool) -> Case:
        drawn = (source.randrange(low, high) for _ in range(rows))
        return tuple(Row(0, n) if prefill else Row(n, 1) for n in drawn)

    cases: list[Case] = [
        (Row(context, 1),) * rows
        for rows in (1, 2, 4, 8, 12, 16, 24, 32, 48, MAX_ROWS)
        for context in (16, 128, 512)
    ]
    cases += [(Row(1500, 1),) * rows for rows in (1, 4, 16)]
    cases += [ragged(rows, 16, 600, prefill=False) for rows in (8, 32, MAX_ROWS)]
    cases += [(Row(0, n),) for n in (2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512)]
    cases += [(Row(context, n),) for n in (8, 64, 256, 512) for context in (128, 512, 1024)]
    cases += [(Row(0, n, ends=False),) for n in (64, 256, 512)]
    shapes = ((5, 8), (5, 32), (8, 32), (8, 64), (16, 16), (32, 8), (64, 4), (64, 8), (128, 4))
    cases += [(Row(0, n),) * rows for n, rows in shapes]
    cases += [ragged(8, 8, 120, prefill=True) for _ in range(2)]
    cases += [
        (Row(200, 1),) * decodes + (Row(0, n),)
        for decodes in (4, 16, 32, 60)
        for n in (32, 128, 448)
    ]
    cases.append((Row(100, 1),) * 32 + (Row(0, 64),) * 4)
    cases.append((Row(200, 1),) * 16 + (Row(256, 256, ends=False),))
    cases.append((Row(200, 1),) * 32 + (Row(512, 480, ends=False),))
    return cases


def quick_design() -> list[Case]:
    """Return every fourth plan, without those that need many KV pages."""
    cases = design()[::QUICK_STRIDE]
    return [case for case in cases if sum(row.context + row.tokens for row in case) <= QUICK_TOKENS]


def features_of_case(case: Case, window: int = 0) -> Features:
    """Return the features of a plan. window: of every layer, in tokens; 0: none."""
    return features_of(
        np.array([row.tokens for row in case]),
        np.array([row.context for row in case]),
        sum(row.ends for row in case),
        window,
    )


def describe(case: Case) -> str:
    """Return a plan as a short text: its first three kinds of rows."""
    kinds = dict.fromkeys(case)
    shown = [f"{case.count(row)} x {row.tokens} on {row.context}" for row in list(kinds)[:3]]
    return ", ".join(shown) + (", ..." if len(kinds) > 3 else "")


def measure(bench: WorkerBench, cases: Sequence[Case], repeats: int) -> Floats:
    """Return the median ms of each case, [cases].

    Each round runs the cases in another order, so that a busy minute of the machine does not fall
    on one kind of step. The first round is not counted.
    """
    bench.fill()
    times: list[list[float]] = [[] for _ in cases]
    order = list(range(len(cases)))
    with tqdm(total=len(cases) * (repeats + 1), unit="step", disable=None) as bar:
        for repeat in range(repeats + 1):
            random.Random(repeat).shuffle(order)
            for index in order:
                ms = bench.measure(cases[index])
                if repeat:
                    times[index].append(ms)
                bar.update()
    return np.array([statistics.median(ms_of_case) for ms_of_case in times])


def fit(features: Sequence[Features], measured_ms: Floats) -> tuple[dict[str, float], Fit]:
    """Return the non-negative ms of each feature with the least squared relative errors."""
    counts = np.array([[getattr(step, name) for name in FEATURES] for step in features], np.float64)
    relative = counts / measured_ms[:, None]
    scale = relative.max(axis=0)
    scale[scale == 0] = 1.0
    prices = non_negative_least_squares(relative / scale, np.ones(len(measured_ms))) / scale
    errors = np.abs(counts @ prices / measured_ms - 1)
    median, p90 = np.percentile(errors, [50, 90])
    quality = Fit(plans=len(features), median_error=_short(median), p90_error=_short(p90))
    return {name: _short(price) for name, price in zip(FEATURES, prices, strict=True)}, quality


def non_negative_least_squares(a: Floats, b: Floats) -> Floats:
    """Return the x >= 0 with the smallest |a x - b|.

    The active set method of Lawson and Hanson, Solving Least Squares Problems (1974), chapter 23.
    """
    x, free = np.zeros(a.shape[1]), np.zeros(a.shape[1], dtype=bool)
    while not free.all():
        gain = np.where(free, -np.inf, a.T @ (b - a @ x))
        if gain.max() <= 1e-10:
            break
        free[gain.argmax()] = True
        while True:
            step = np.zeros_like(x)
            step[free] = np.linalg.lstsq(a[:, free], b, rcond=None)[0]
            below = free & (step <= 0)
            if not below.any():
                break
            x += (x[below] / (x[below] - step[below])).min() * (step - x)
            free &= x > 1e-12
            x[~free] = 0.0
        x = step
    return x


def _short(value: float) -> float:
    return float(f"{value:.4g}")


# --- delays outside the steps ---------------------------------------------------------------------


def calibrate(model: CostModel, runs: Sequence[dict[str, Any]], slowdown: float) -> CostModel:
    """Return the model with the median delays of the runs of a `bench.serving --json`.

    `plan` and `result` are kept, as no run measures them. `slowdown` is measured over simulated
    latency of one trace, as `bench.simulate --compare` prints it.
    """
    summaries = [measured["summary"] for measured in runs]

    def p50(name: str) -> float:
        return float(statistics.median(s[name]["p50"] for s in summaries if s[name]))

    gap = statistics.median(measured["server_info"]["step_gap_ms_p50"] for measured in runs)
    delays = Delays(
        message_in=_short(p50("to_server") + p50("tokenize")),
        plan=model.delays_ms.plan,
        gap=_short(gap),
        result=model.delays_ms.result,
        delivery=_short(p50("delivery")),
    )
    return msgspec.structs.replace(model, delays_ms=delays, slowdown=slowdown)


# --- the command line -----------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    """Fit or calibrate, and return the exit code: 0 written, 2 bad flags or no model."""
    argv = list(sys.argv[1:] if argv is None else argv)
    return run_command("bench.simulate.fit_cost_model", lambda: _main(argv), on_failure=EXIT_USAGE)


def _main(argv: list[str]) -> int:
    arguments = _parser().parse_args(argv)
    if arguments.calibrate is not None:
        runs = read_runs(arguments.calibrate)
        model = calibrate(load(arguments.out), runs, arguments.slowdown)
    else:
        model = _measured_model(arguments, argv)
    save(arguments.out, model)
    print(msgspec.json.format(msgspec.json.encode(model), indent=2).decode())
    print(f"written to {arguments.out}")
    return EXIT_OK


def _measured_model(arguments: argparse.Namespace, argv: list[str]) -> CostModel:
    row_tokens = QUICK_ROW_TOKENS if arguments.quick else MAX_ROW_TOKENS
    bench, measured_on = make_bench(server_flags.from_namespace(arguments), row_tokens)
    cases = quick_design() if arguments.quick else design()
    features = [features_of_case(case, measured_on.window) for case in cases]
    measured = measure(bench, cases, arguments.repeats)
    ms, quality = fit(features, measured)
    command = shlex.join(["python", "-m", "bench.simulate.fit_cost_model", *argv])
    model = CostModel(
        ms=ms, measured_on=msgspec.structs.replace(measured_on, command=command), fit=quality
    )
    for case, step, measured_ms in zip(cases, features, measured, strict=True):
        print(f"{measured_ms:8.2f} ms, predicted {model.step_ms(step):8.2f}: {describe(case)}")
    print(f"error: median {quality.median_error:.1%}, p90 {quality.p90_error:.1%}")
    if arguments.out.exists():
        model = msgspec.structs.replace(model, delays_ms=load(arguments.out).delays_ms)
    return model


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("bench.simulate.fit_cost_model", __doc__)
    parser.add_argument("--out", type=Path, default=DEFAULT, help=f"(default: {DEFAULT.name})")
    parser.add_argument("--repeats", type=int, default=7, help="runs of every plan (default: 7)")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="measure a quarter of the plans: a fit in half a minute",
    )
    parser.add_argument(
        "--calibrate", type=Path, metavar="RUN.json", help="take the delays from a measured run"
    )
    parser.add_argument(
        "--slowdown",
        type=float,
        default=1.0,
        help="with --calibrate: duration of a step in a server, relative to the model (default: 1)",
    )
    server_flags.add_flags(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
