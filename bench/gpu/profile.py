"""Profile steps of the worker: the device's busy share, its gaps, and the longest kernels.

    python -m bench.gpu.profile --model DIR --load-format dummy

Takes the flags of a server. Times are those of torch's profiler, which on a GPU sees each kernel,
also those of a graph; so the busy share is that of kernels, and not of launched steps. Decode steps
are launched one ahead, as in a server. On a CPU, torch's operations take the place of kernels.
"""

import argparse
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from bench.cli.command import command_parser, run_command
from bench.report.table import FigureRow, add_json_flag, show
from bench.worker_steps import Row, WorkerBench
from quadriga.errors import ConfigError
from quadriga.server.config import server_config as server_flags
from quadriga.server.config.server_config import ServerConfig
from quadriga.server.models.resolve import resolve_model


@dataclass(frozen=True, slots=True, order=True)
class Kernel:
    """A kernel that ran, with times in microseconds."""

    began: float
    ended: float
    name: str


@dataclass(frozen=True, slots=True)
class Timeline:
    """What kernels say of a device between the first one's start and the last one's end.

    Attributes:
        wall_us: the time.
        busy_us: the time in which a kernel ran.
        gaps_us: the times between, ascending.
    """

    wall_us: float
    busy_us: float
    gaps_us: tuple[float, ...]

    @classmethod
    def of(cls, kernels: Iterable[Kernel]) -> "Timeline":
        """Return the timeline of kernels, which may overlap and come in any order."""
        ordered = sorted(kernels)
        if not ordered:
            return cls(0.0, 0.0, ())
        first, gaps = ordered[0], []
        reached = first.ended
        for kernel in ordered[1:]:
            if kernel.began > reached:
                gaps.append(kernel.began - reached)
            reached = max(reached, kernel.ended)
        wall = reached - first.began
        return cls(wall, wall - sum(gaps), tuple(sorted(gaps)))

    @property
    def busy_share(self) -> float:
        """Busy time over all time; 0 without kernels."""
        return self.busy_us / self.wall_us if self.wall_us else 0.0


def longest(kernels: Sequence[Kernel], count: int) -> list[tuple[str, int, float]]:
    """Return name, number of runs and microseconds in all of the kernels that took longest."""
    runs: dict[str, list[float]] = defaultdict(list)
    for kernel in kernels:
        runs[kernel.name].append(kernel.ended - kernel.began)
    found = [(name, len(times), sum(times)) for name, times in runs.items()]
    return sorted(found, key=lambda one: -one[2])[:count]


BATCHES, CONTEXT, PROMPT = (1, 64), 512, 256
NUM_STEPS, NUM_WARM_UP, NUM_SHOWN = 20, 5, 8
MAX_NAME = 60


def main(argv: Sequence[str] | None = None) -> int:
    """Profile what the command line describes, and return the exit code."""
    parser = command_parser("bench.gpu.profile", __doc__)
    shown = " ".join(map(str, BATCHES))
    parser.add_argument(
        "--batches",
        type=int,
        nargs="+",
        default=BATCHES,
        metavar="N",
        help=f"rows of decode steps (default: {shown})",
    )
    parser.add_argument(
        "--context", type=int, default=CONTEXT, help=f"tokens of each row (default: {CONTEXT})"
    )
    parser.add_argument(
        "--prompt",
        type=int,
        default=PROMPT,
        help=f"prompt tokens of the step that has some (default: {PROMPT})",
    )
    parser.add_argument(
        "--steps",
        type=int,
        default=NUM_STEPS,
        help=f"decode steps that are profiled (default: {NUM_STEPS})",
    )
    add_json_flag(parser)
    server_flags.add_flags(parser)
    arguments = parser.parse_args(argv)
    return run_command("bench.gpu.profile", lambda: _main(arguments))


def _main(arguments: argparse.Namespace) -> int:
    config = server_flags.from_namespace(arguments)
    bench = _bench(config, arguments)
    summaries: list[FigureRow] = []
    tops: list[FigureRow] = []
    for kind, num_steps, kernels in _profiles(bench, arguments):
        summaries.append({"step": kind, **summary_of(kernels, num_steps)})
        for name, count, microseconds in longest(kernels, NUM_SHOWN):
            tops.append(
                {
                    "step": kind,
                    "kernel": name[:MAX_NAME],
                    "runs a step": count / num_steps,
                    "us a step": microseconds / num_steps,
                }
            )
    title = f"{config.model.shown_name} on {bench.runner.table.device}"
    show(f"steps, {title}", summaries, arguments.json)
    show(f"kernels, {title}", tops, arguments.json)
    return 0


def _bench(config: ServerConfig, arguments: argparse.Namespace) -> WorkerBench:
    from worker_proc.startup.build import make_runner

    files = resolve_model(config.model, show_progress=True)
    rows = max(arguments.batches)
    reach = max(arguments.context + arguments.steps + NUM_WARM_UP + 2, arguments.prompt)
    if reach >= files.context_length:
        raise ConfigError(
            f"the model's context is {files.context_length} tokens, --context"
            f" {arguments.context} and --prompt {arguments.prompt} need more than {reach}:"
            " lower them"
        )
    page = config.worker.page_size
    config = config.replace(
        max_batch_size=rows + 1,
        max_running_requests=rows + 1,
        max_total_tokens=(rows + 1) * (-(-reach // page) + 1) * page,
    )
    runner = make_runner(config, files)
    runner.warm_up()
    return WorkerBench(runner)


def _profiles(
    bench: WorkerBench, arguments: argparse.Namespace
) -> Iterator[tuple[str, int, list[Kernel]]]:
    """Yield, for each kind of step, its name, the number of steps, and their kernels."""
    context, num_steps = arguments.context, arguments.steps
    for batch in arguments.batches:
        with bench.decoding_ahead(batch, context, num_steps + NUM_WARM_UP + 1) as step:
            for _ in range(NUM_WARM_UP):
                step()
            with profiled(bench) as kernels:
                for _ in range(num_steps):
                    step()
        yield f"{batch} rows of {context} tokens", num_steps, kernels()
    case = (Row(context, 1),) * max(arguments.batches) + (Row(0, arguments.prompt),)
    bench.measure(case)
    with bench.prepared(case) as step, profiled(bench) as kernels:
        step()
    yield f"{max(arguments.batches)} rows, and {arguments.prompt} of a prompt", 1, kernels()


@contextmanager
def profiled(bench: WorkerBench) -> Iterator[Callable[[], list[Kernel]]]:
    """Profile a block; the function that is yielded returns its kernels afterwards."""
    from torch.profiler import ProfilerActivity, profile

    is_gpu = bench.runner.table.device.type == "cuda"
    activities = [ProfilerActivity.CUDA] if is_gpu else [ProfilerActivity.CPU]
    with profile(activities=activities) as profiler:
        yield lambda: _kernels(profiler, is_gpu)
        if is_gpu:
            from torch.cuda import synchronize

            synchronize()


def _kernels(profiler: Any, is_gpu: bool) -> list[Kernel]:
    from torch.profiler import DeviceType

    kind = DeviceType.CUDA if is_gpu else DeviceType.CPU
    return [
        Kernel(event.time_range.start, event.time_range.end, event.name)
        for event in profiler.events()
        if event.device_type == kind and event.cpu_parent is None
    ]


def summary_of(kernels: Sequence[Kernel], num_steps: int) -> FigureRow:
    """Return the figures of the kernels of several steps."""
    timeline = Timeline.of(kernels)
    gaps = timeline.gaps_us
    return {
        "ms": timeline.wall_us / 1000 / num_steps,
        "busy share": timeline.busy_share,
        "kernels": len(kernels) / num_steps,
        "idle us": sum(gaps) / num_steps,
        "longest gap us": gaps[-1] if gaps else 0.0,
    }


if __name__ == "__main__":
    sys.exit(main())
