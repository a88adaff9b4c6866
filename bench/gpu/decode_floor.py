"""Compare decode steps on a GPU, with and without CUDA graphs, with the bound by its memory.

    python -m bench.gpu.decode_floor --model DIR --load-format dummy
    python -m bench.gpu.decode_floor                      # SmolLM2-135M, built in

Takes the flags of a server, and `--batches` and `--contexts`. Prints, for each number of rows and
tokens of context, ms of a step: as a graph and kernel by kernel, each launched before the step
before it has ended, as in a server; of the graph alone, replayed without the copies of a step; the
floor (bytes of weights and keys over the measured read speed, or operations over the measured rate
of a large product, whichever takes longer, product by product: bench/roofline/roofline_model.py);
and graph over floor. With `--plain` also of a graph in which cuBLAS computes every product, and no
kernel does what others can (QUADRIGA_GPU_STEPS=plain).
"""

import argparse
import gc
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from bench.cli.command import command_parser, run_command
from bench.report.table import FigureRow, add_json_flag, show
from bench.roofline.model_work import NUMBER_BYTES, work_of
from bench.roofline.roofline_model import Speed, floor
from bench.worker_steps import Row, WorkerBench
from quadriga.errors import ConfigError
from quadriga.server.config import server_config as server_flags
from quadriga.server.config.server_config import ServerConfig
from quadriga.server.models.resolve import ModelFiles, resolve_model

if TYPE_CHECKING:
    from worker_proc.step.runner import Runner

BATCHES, CONTEXTS = (1, 8, 64, 256), (128, 1000)
NUM_STEPS, NUM_WARM_UP = 50, 5
CEILING_WIDTH = 8192


@dataclass(frozen=True, slots=True)
class FloorSizes:
    """What is measured: every batch with every context.

    Attributes:
        batches: rows of a step.
        contexts: tokens of each row before the first step.
        num_steps: steps that are measured.
    """

    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    num_steps: int = NUM_STEPS

    @property
    def num_further(self) -> int:
        """Tokens of a row beyond its context: one that is known, and one of each step."""
        return self.num_steps + NUM_WARM_UP + 2

    @property
    def room(self) -> int:
        """Tokens of a row in all."""
        return max(self.contexts) + self.num_further

    def cut_to(self, context_length: int) -> "FloorSizes":
        """Return the sizes with contexts that leave the model room for the steps.

        Raises:
            ConfigError: there is no room.
        """
        longest = context_length - self.num_further
        if longest < 1:
            raise ConfigError(
                f"the model's context is {context_length} tokens, {self.num_steps} steps need"
                f" {self.num_further + 1}: lower --steps"
            )
        contexts = dict.fromkeys(min(context, longest) for context in self.contexts)
        return FloorSizes(self.batches, tuple(contexts), self.num_steps)

    def fitted(self, config: ServerConfig) -> ServerConfig:
        """Return the flags with a pool that holds the largest step, and no more."""
        rows, page = max(self.batches), config.worker.page_size
        return config.replace(
            max_batch_size=rows,
            max_running_requests=rows,
            max_total_tokens=rows * -(-self.room // page) * page,
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Measure what the command line describes, and return the exit code."""
    parser = command_parser("bench.gpu.decode_floor", __doc__)
    for name, values in (("batches", BATCHES), ("contexts", CONTEXTS)):
        shown = " ".join(map(str, values))
        parser.add_argument(f"--{name}", type=int, nargs="+", default=values,
                            metavar="N", help=f"(default: {shown})")  # fmt: skip
    parser.add_argument("--steps", type=int, default=NUM_STEPS, help=f"(default: {NUM_STEPS})")
    parser.add_argument(
        "--ceiling-width",
        type=int,
        default=CEILING_WIDTH,
        metavar="ROWS",
        help=f"of the matrices of the ceiling (default: {CEILING_WIDTH})",
    )
    parser.add_argument("--plain", action="store_true", help="measure plain steps, too")
    add_json_flag(parser)
    server_flags.add_flags(parser)
    arguments = parser.parse_args(argv)
    return run_command("bench.gpu.decode_floor", lambda: _main(arguments))


def _main(arguments: argparse.Namespace) -> int:
    """Load the model two or three times, and show a row for each batch and context."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")  # such as the chosen products
    config = server_flags.from_namespace(arguments)
    files = resolve_model(config.model, show_progress=True)
    sizes = FloorSizes(tuple(arguments.batches), tuple(arguments.contexts), arguments.steps)
    sizes = sizes.cut_to(files.context_length)
    config = sizes.fitted(config)
    graphs = times_of(config, files, sizes)
    plain = _plain_times_of(config, files, sizes) if arguments.plain else {}
    eager = times_of(config.replace(disable_cuda_graph=True), files, sizes)
    device, dtype, speed, rate = describe(config, arguments.ceiling_width)
    work = work_of(files.config, "none", NUMBER_BYTES[dtype])
    rates = Speed(speed, dict.fromkeys(work.products, rate))
    rows: list[FigureRow] = []
    for (batch, context), (ms, alone) in graphs.items():
        least = 1000 * sum(floor(work, (Row(context, 1),) * batch, rates).values())
        rows.append({
            "rows": batch,
            "context": context,
            "graph ms": ms,
            **({"plain ms": plain[batch, context][0]} if plain else {}),
            "eager ms": eager[batch, context][0],
            "alone ms": alone,
            "floor ms": least,
            "ratio": ms / least,
        })  # fmt: skip
    title = f"{config.model.shown_name} {dtype} on {device}"
    ceilings = f"reads {speed / 1e9:.0f} GB/s, multiplies at {rate / 1e12:.0f} TFLOP/s"
    show(f"{title}, which {ceilings}", rows, arguments.json)
    return 0


def times_of(
    config: ServerConfig, files: ModelFiles, sizes: FloorSizes
) -> dict[tuple[int, int], tuple[float, float | None]]:
    """Return, by (rows, context), the median ms of a step and of its graph alone, if it has one."""
    from worker_proc.startup.build import make_runner

    runner = make_runner(config, files)
    runner.warm_up()
    bench = WorkerBench(runner)
    times = dict(_measure(bench, sizes))
    # The next model needs the memory of this one, and torch would keep it.
    del runner, bench
    _free_gpu_memory()
    return times


def _plain_times_of(
    config: ServerConfig, files: ModelFiles, sizes: FloorSizes
) -> dict[tuple[int, int], tuple[float, float | None]]:
    from worker_proc.gpu.pages import PLAIN, STEPS_VARIABLE

    os.environ[STEPS_VARIABLE] = PLAIN
    try:
        return times_of(config, files, sizes)
    finally:
        del os.environ[STEPS_VARIABLE]


def _measure(
    bench: WorkerBench, sizes: FloorSizes
) -> Iterator[tuple[tuple[int, int], tuple[float, float | None]]]:
    num_calls = sizes.num_steps + NUM_WARM_UP
    for context in sizes.contexts:
        for batch in sizes.batches:
            with bench.decoding_ahead(batch, context, num_calls + 1) as step:
                ms = median([step() for _ in range(num_calls)][NUM_WARM_UP:])
            yield (batch, context), (ms, _replay_ms(bench.runner))


def _replay_ms(runner: "Runner") -> float | None:
    """Return the ms of the last step's graph without the copies of a step."""
    from bench.gpu.ceilings import seconds_of

    replay = runner.engine.last_replay
    return None if replay is None else 1000 * seconds_of(replay, runner.table.device)


def _free_gpu_memory() -> None:
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def describe(config: ServerConfig, ceiling_width: int) -> tuple[str, str, float, float]:
    """Return device, dtype, bytes/s of reading a large tensor, and operations/s of a product.

    The product is of two square matrices of `ceiling_width` rows.
    """
    from bench.gpu.ceilings import flops_per_second, read_bytes_per_second
    from worker_proc.startup.devices import choose_device, choose_dtype

    device = choose_device(config.worker.device)
    dtype = choose_dtype(config.worker.dtype, device)
    name = str(dtype).removeprefix("torch.")
    rate = flops_per_second(device, ceiling_width, dtype)
    return str(device), name, read_bytes_per_second(device), rate


if __name__ == "__main__":
    sys.exit(main())
