"""How the processes share out a CPU's cores: where there are enough, the worker has its own."""

import math
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from quadriga.config.worker_args import WorkerArgs

Cpus = frozenset[int]
"""Numbers of logical CPUs."""

SPARED = ((64, 4), (16, 2), (4, 1))
"""With so many cores or more, so many are left to the processes beside the worker. Of fewer none
can be spared: all share all."""
TOPOLOGY = Path("/sys/devices/system/cpu")
QUOTAS = (Path("/sys/fs/cgroup/cpu.max"), Path("/sys/fs/cgroup/cpu/cpu.cfs_quota_us"))
"""Of a container: microseconds of CPU time it may have, and in how many (the second has a file of
its own, in the older form)."""
CARD = Path("/dev/nvidiactl")


@dataclass(frozen=True, slots=True)
class CpuPlan:
    """threads: of each worker process. worker, others: the CPUs that they keep to; empty where
    everybody may run everywhere."""

    threads: int
    worker: Cpus = frozenset()
    others: Cpus = frozenset()


def shares(args: WorkerArgs) -> CpuPlan:
    """On this machine, of what this process is allowed to use. Where a system has no places for
    processes (macOS, Windows), everybody may run everywhere."""
    found = share_out(_cores(_allowed()), _quota(), args)
    return found if hasattr(os, "sched_setaffinity") else CpuPlan(found.threads)


def share_out(cores: Sequence[Cpus], quota: float, args: WorkerArgs) -> CpuPlan:
    """cores: the CPUs of each. quota: so many CPUs' time a container may have."""
    usable = max(1, math.floor(min(len(cores), quota)))
    spared = next((spared for least, spared in SPARED if usable >= least), 0)
    threads = args.worker_threads or max(1, (usable - spared) // args.tp)
    taken = threads * args.tp
    # With less time than cores it is the time that is short, and nothing is gained by places.
    if (
        args.no_affinity
        or on_a_card(args)
        or not spared
        or usable < len(cores)
        or taken >= len(cores)
    ):
        return CpuPlan(threads)
    return CpuPlan(threads, _together(cores[-taken:]), _together(cores[:-taken]))


def on_a_card(args: WorkerArgs) -> bool:
    """The worker computes there, as far as can be told before torch is loaded."""
    return args.device not in ("cpu", "auto") or (args.device == "auto" and CARD.exists())


def keep_to(cpus: Cpus) -> None:
    """This process, with the threads that it starts from now on."""
    if cpus:
        os.sched_setaffinity(0, cpus)


def _together(cores: Iterable[Cpus]) -> Cpus:
    return frozenset().union(*cores)


def _allowed() -> Cpus:
    if sys.platform == "linux":
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def _cores(allowed: Cpus) -> list[Cpus]:
    """The allowed CPUs, by the cores whose hardware threads they are."""
    cores = dict.fromkeys(_siblings(cpu) & allowed for cpu in sorted(allowed))
    return list(cores)


def _siblings(cpu: int) -> Cpus:
    try:
        text = (TOPOLOGY / f"cpu{cpu}/topology/thread_siblings_list").read_text()
        return frozenset(parse_cpus(text)) | {cpu}
    except (OSError, ValueError):
        return frozenset((cpu,))


def parse_cpus(text: str) -> list[int]:
    """0-2,8 as Linux writes it. ValueError for anything else."""
    found: list[int] = []
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


def show_cpus(cpus: Cpus) -> str:
    """The other way round."""
    runs: list[list[int]] = []
    for cpu in sorted(cpus):
        if runs and runs[-1][-1] == cpu - 1:
            runs[-1].append(cpu)
        else:
            runs.append([cpu])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _quota() -> float:
    """CPUs' time that a container may have; infinite outside one."""
    new, old = QUOTAS
    try:
        if new.exists():
            granted, period = new.read_text().split()
        else:
            granted = old.read_text()
            period = old.with_name("cpu.cfs_period_us").read_text()
        share = float(granted) / float(period)
        return share if share > 0 else math.inf
    except (OSError, ValueError):  # "max" is no number
        return math.inf
