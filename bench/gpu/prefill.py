"""Measure steps of prompts: tokens/s, and operations/s against what the device can do.

    python -m bench.gpu.prefill --model DIR --load-format dummy

Takes the flags of a server. Operations are those of the model's products and attention; norms,
activations and the choice of tokens are not counted.
"""

import argparse
import sys
from collections.abc import Sequence
from statistics import median

from bench.cli.command import command_parser, run_command
from bench.report.table import FigureRow, add_json_flag, show
from bench.roofline.model_work import NUMBER_BYTES, work_of
from bench.roofline.roofline_model import Work, num_rows, pairs, sampled_pairs
from bench.worker_steps import Row, WorkerBench
from quadriga.errors import ConfigError
from quadriga.server.config import server_config as server_flags
from quadriga.server.config.server_config import ServerConfig
from quadriga.server.models.resolve import resolve_model

# Prompts of a step, and tokens of each: one, a batch, short ones, and the next turn of a chat.
SHAPES = ("1x128", "1x1024", "8x1024", "64x128", "1x8192", "1x64+4096")
NUM_STEPS, NUM_WARM_UP = 5, 2
CEILING_WIDTH = 4096


def main(argv: Sequence[str] | None = None) -> int:
    """Measure what the command line describes, and return the exit code."""
    parser = command_parser("bench.gpu.prefill", __doc__)
    parser.add_argument(
        "--shapes",
        nargs="+",
        default=SHAPES,
        metavar="ROWSxTOKENS[+CACHED]",
        help=f"(default: {' '.join(SHAPES)})",
    )
    parser.add_argument("--steps", type=int, default=NUM_STEPS, help=f"(default: {NUM_STEPS})")
    parser.add_argument(
        "--ceiling-width",
        type=int,
        default=CEILING_WIDTH,
        metavar="ROWS",
        help=f"of the matrices of the ceiling (default: {CEILING_WIDTH})",
    )
    add_json_flag(parser)
    server_flags.add_flags(parser)
    arguments = parser.parse_args(argv)
    return run_command("bench.gpu.prefill", lambda: _main(arguments))


def _main(arguments: argparse.Namespace) -> int:
    config = server_flags.from_namespace(arguments)
    files = resolve_model(config.model, show_progress=True)
    shapes = {text: rows_of(text) for text in arguments.shapes}
    fitting = {
        text: rows
        for text, rows in shapes.items()
        if rows[0].context + rows[0].tokens < files.context_length
    }
    for text in shapes.keys() - fitting.keys():
        print(f"{text} is left out: the model's context is {files.context_length} tokens")
    if not fitting:
        return 0
    rows = _measure(config, fitting, arguments)
    show(f"prompts, {config.model.shown_name}", rows, arguments.json)
    return 0


def _measure(
    config: ServerConfig, shapes: dict[str, tuple[Row, ...]], arguments: argparse.Namespace
) -> list[FigureRow]:
    from bench.gpu.ceilings import flops_per_second
    from worker_proc.startup.build import make_runner

    files = resolve_model(config.model)
    runner = make_runner(fitted(config, list(shapes.values())), files)
    runner.warm_up()
    bench, dtype = WorkerBench(runner), str(runner.dtype).removeprefix("torch.")
    work = work_of(files.config, "none", NUMBER_BYTES[dtype])
    most = flops_per_second(runner.table.device, arguments.ceiling_width, runner.dtype)
    measured: list[FigureRow] = []
    for text, rows in shapes.items():
        times = [bench.measure(rows) for _ in range(arguments.steps + NUM_WARM_UP)]
        seconds = median(times[NUM_WARM_UP:]) / 1000
        rate = operations(work, rows) / seconds
        measured.append(
            {
                "prompts": text,
                "dtype": dtype,
                "ms": 1000 * seconds,
                "tokens/s": sum(row.tokens for row in rows) / seconds,
                "TFLOP/s": rate / 1e12,
                "of the ceiling": rate / most,
            }
        )
    return measured


def rows_of(text: str) -> tuple[Row, ...]:
    """Return the rows of "ROWSxTOKENS" or "ROWSxTOKENS+CACHED", or raise ConfigError."""
    shape, _, cached = text.partition("+")
    numbers = [*shape.split("x"), cached or "0"]
    if len(numbers) != 3 or not all(number.isdecimal() for number in numbers):
        raise ConfigError(f"--shapes {text!r} is no shape: write 8x1024, or 1x64+4096")
    rows, tokens, context = map(int, numbers)
    if rows < 1 or tokens < 2:
        raise ConfigError(f"--shapes {text!r} needs a row or more, of 2 tokens or more")
    return (Row(context, tokens),) * rows


def fitted(config: ServerConfig, shapes: Sequence[Sequence[Row]]) -> ServerConfig:
    """Return the flags with rows, a pool and a prefill budget that hold the largest step."""
    page = config.worker.page_size
    most_rows = max(len(rows) for rows in shapes)
    pool = max(sum(-(-(row.context + row.tokens + 1) // page) for row in rows) for rows in shapes)
    most_tokens = max(sum(row.tokens for row in rows) for rows in shapes)
    return config.replace(
        max_running_requests=most_rows,
        max_batch_size=most_rows,
        max_total_tokens=pool * page,
        prefill_max_tokens=most_tokens,
        chunked_prefill_size=most_tokens,
    )


def operations(work: Work, rows: Sequence[Row]) -> int:
    """Return the multiplications and additions of a step."""
    count = sum(
        product.operations(num_rows(product, rows) * product.num_chosen)
        for product in work.products
    )
    last = len(work.attention) - 1
    for layer, (query_width, _) in enumerate(work.attention):
        count += 4 * query_width * (sampled_pairs(rows) if layer == last else pairs(rows))
    return count


if __name__ == "__main__":
    sys.exit(main())
