"""Measure what adapters cost in the steps of the worker, in this process.

    python -m bench.roofline.adapters --rank 16 --adapters 1 8 32 -- --quantization int8

Steps decode a token of each stream. Streams have different adapters, which change every projection
and have random numbers. Steps with adapters and without take turns. The least time of a step is
that without adapters, and that of reading the adapters from memory once. The exit code is 1 if a
step takes longer than that over `--share`.

    python -m bench.roofline.adapters --experts --adapters 1 8 -- --model DIRECTORY

With `--experts`, adapters change also the matrices of experts, of which a step reads those that it
has chosen, and steps are compared with those of plain torch, which take turns with them.

Takes the flags of a server behind `--`.
"""

import random
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from bench.cli.command import EXIT_FAILED, EXIT_OK, command_parser, run_command
from bench.report.table import markdown_table
from bench.turns import split_common
from bench.worker_steps import WorkerBench, make_bench
from quadriga.errors import ConfigError
from quadriga.server.config import server_config
from quadriga.server.config.parser import ServerParser
from quadriga.server.models.resolve import resolve_model

if TYPE_CHECKING:  # needs torch, which make_bench imports after it has set the environment
    from worker_proc.adapters.change import Adapter
    from worker_proc.models.base import Model

Figures = tuple[float, float]

NUM_STEPS = 6  # of a turn; the first one is not counted
GB = 1e9


class AdapterSteps(NamedTuple):
    """Steps of streams after a context, with some adapters, by an engine."""

    context: int
    num_adapters: int
    backend: str = "native"


class AdapterTurn(NamedTuple):
    """A turn: the ms of a step of each kind, and the bytes of memory that are read in a second."""

    ms: dict[AdapterSteps, float]
    bytes_per_s: float


def random_adapter(model: "Model", rank: int, seed: int, experts: bool) -> "Adapter":
    """Return an adapter of every projection; of those of experts only with `experts`."""
    import torch

    from worker_proc.adapters.change import Adapter, LinearChange, Part
    from worker_proc.models.layers import Experts, Linear

    generator = torch.Generator().manual_seed(seed)
    of_experts = {
        layer
        for module in model.modules()
        if isinstance(module, Experts) and not experts
        for layer in (*module.gate_up, *module.down)
    }
    numbers = {matrix: number for number, matrix in enumerate(model.matrices())}
    parts: dict[int, list[Part]] = {}
    for name, rows in model.checkpoint_rows().items():
        matrix = rows.matrix
        if not isinstance(matrix, Linear) or matrix in of_experts or "head" in name:
            continue
        of_matrix = parts.setdefault(numbers[matrix], [])
        up = torch.randn(rows.count, rank, generator=generator) * 0.02
        of_matrix.append(Part(rows.first, up, len(of_matrix) * rank))
    changes = {}
    for matrix, number in numbers.items():
        if number in parts:
            size = len(parts[number]) * rank, matrix.weight.shape[1]
            down = torch.randn(*size, generator=generator) * 0.02
            changes[number] = LinearChange(down, tuple(parts[number]))
    return Adapter(changes)


def steps_ms(bench: WorkerBench, kind: AdapterSteps, streams: int) -> float:
    """Return the median ms of steps of one kind."""
    with bench.decoding(streams, kind.context - NUM_STEPS // 2, NUM_STEPS) as decode:
        if kind.num_adapters:
            adapters = [slot % kind.num_adapters for slot in range(streams)]
            bench.runner.table.adapters[:streams] = adapters
        decode()
        return median(decode() for _ in range(NUM_STEPS - 1))


def measure(config: server_config.ServerConfig, options: Namespace) -> int:
    """Measure and print; return the exit code."""
    context_length = max(options.contexts) + NUM_STEPS
    bench, machine = make_bench(config, context_length)
    if machine.device != "cpu":
        raise ConfigError(f"device is {machine.device}: the steps are those of a cpu")
    from bench.roofline.machine_speed import ReadSpeed
    from worker_proc.cpu.engine import NativeEngine
    from worker_proc.models.decoder import build_model

    runner = bench.runner
    if not isinstance(runner.engine, NativeEngine):
        raise ConfigError("the steps are those of the native kernels: no --attention-backend")
    benches = {"native": bench}
    if options.experts:
        plain = config.replace(attention_backend="torch", quantization="none")
        benches["torch"], _ = make_bench(plain, context_length)
    model = build_model(resolve_model(config.model).config)
    for index in range(max(options.adapters)):
        adapter = random_adapter(model, options.rank, index, options.experts)
        for one in benches.values():
            one.runner.engine.set_adapter(index, adapter)
    adapter_bytes = runner.engine.pack_adapter(adapter).num_bytes
    for one in benches.values():
        one.fill()
    reads = ReadSpeed(config.worker, runner.dtype)
    kinds = [
        AdapterSteps(context, n, backend)
        for context in options.contexts
        for n in (0, *options.adapters)
        for backend in benches
    ]

    def take_turn(number: int) -> AdapterTurn:
        order = random.Random(number).sample(kinds, len(kinds))
        before = reads.measure()
        ms = {kind: steps_ms(benches[kind.backend], kind, options.streams) for kind in order}
        return AdapterTurn(ms, (before + reads.measure()) / 2)

    turns = [take_turn(number) for number in range(options.turns)]
    print(
        f"{machine.model}, {machine.dtype}, quantization {runner.quantization},"
        f" {machine.threads} threads, {options.streams} streams, rank {options.rank},"
        f" {adapter_bytes / 1e6:.1f} MB an adapter; memory is read at"
        f" {median(turn.bytes_per_s for turn in turns) / GB:.1f} GB/s\n"
    )
    if options.experts:
        ours = [kind for kind in kinds if kind.backend == "native"]
        print_steps(turns, ours, ("ms by torch", "times ours"), beside_torch)
        return EXIT_OK
    beside = partial(beside_memory, adapter_bytes=adapter_bytes)
    figures = print_steps(turns, kinds, ("at most", "share of that"), beside)
    return EXIT_OK if min(share for _, share in figures) >= options.share else EXIT_FAILED


def beside_torch(turns: Sequence[AdapterTurn], kind: AdapterSteps) -> Figures:
    """Return the ms of a step by plain torch, and how many times those of the native kernels."""
    theirs = [turn.ms[kind._replace(backend="torch")] for turn in turns]
    return median(theirs), median_ratio(theirs, [turn.ms[kind] for turn in turns])


def beside_memory(turns: Sequence[AdapterTurn], kind: AdapterSteps, adapter_bytes: int) -> Figures:
    """Return the rate that memory allows, beside that without adapters, and the share of it."""
    base = [turn.ms[kind._replace(num_adapters=0)] for turn in turns]
    read = [1000 * kind.num_adapters * adapter_bytes / turn.bytes_per_s for turn in turns]
    least = [b + r for b, r in zip(base, read, strict=True)]
    return median_ratio(base, least), median_ratio(least, [turn.ms[kind] for turn in turns])


def print_steps(
    turns: Sequence[AdapterTurn],
    kinds: Sequence[AdapterSteps],
    header: tuple[str, str],
    beside: Callable[[Sequence[AdapterTurn], AdapterSteps], Figures],
) -> Sequence[Figures]:
    """Print a table of steps: their ms, the rate beside that without adapters, two more columns.

    Args:
        turns: what was measured.
        kinds: the steps, a row each.
        header: names of the two columns.
        beside: returns their values for steps of a kind.

    Returns:
        The values of the two columns.
    """
    figures = [beside(turns, kind) for kind in kinds]
    rows = []
    for kind, values in zip(kinds, figures, strict=True):
        ms = [turn.ms[kind] for turn in turns]
        rate = median_ratio([turn.ms[kind._replace(num_adapters=0)] for turn in turns], ms)
        numbers = (f"{number:.2f}" for number in (median(ms), rate, *values))
        rows.append((str(kind.context), str(kind.num_adapters), *numbers))
    print(markdown_table(("context", "adapters", "ms a step", "of the base's rate", *header), rows))
    return figures


def median_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> float:
    """Return the median of the ratios of two lists of values of the same turns."""
    return median(n / d for n, d in zip(numerators, denominators, strict=True))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    own, flags = split_common(sys.argv[1:] if arguments is None else list(arguments))
    parser = command_parser("bench.roofline.adapters", __doc__)
    parser.add_argument("--rank", type=int, default=16, help="of each product")
    parser.add_argument("--adapters", type=int, nargs="+", default=[1, 8, 32], help="in a step")
    parser.add_argument("--experts", action="store_true", help="change those, and time torch, too")
    parser.add_argument("--contexts", type=int, nargs="+", default=[128, 1024], help="in tokens")
    parser.add_argument("--streams", type=int, default=32, help="that decode in a step")
    parser.add_argument("--turns", type=int, default=8, help="of each kind of step")
    parser.add_argument("--share", type=float, default=0.9, help="of the rate that memory allows")
    options = parser.parse_args(own)

    def work() -> int:
        namespace = ServerParser("bench.roofline.adapters").parse_flags(flags)
        return measure(server_config.from_namespace(namespace), options)

    return run_command("bench.roofline.adapters", work)


if __name__ == "__main__":
    sys.exit(main())
