"""Assignment of CPU cores to the processes: if there are enough, the worker has its own."""

import math
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from quadriga.config.replica_args import ONLY_REPLICA, ReplicaPlace
from quadriga.config.worker_args import WorkerArgs

# Numbers of logical CPUs.
Cpus = frozenset[int]

# (cores of the machine, cores left to the other processes); with fewer, all processes share all.
SPARE_CORES = ((64, 4), (16, 2), (4, 1))
TOPOLOGY = Path("/sys/devices/system/cpu")
# A container's CPU time in microseconds per period, for cgroups v2 and v1; v1 has the period in a
# file of its own.
QUOTAS = (Path("/sys/fs/cgroup/cpu.max"), Path("/sys/fs/cgroup/cpu/cpu.cfs_quota_us"))
GPU_DEVICE = Path("/dev/nvidiactl")


@dataclass(frozen=True, slots=True)
class CpuPlan:
    """Threads and CPUs of the processes.

    Attributes:
        threads: number of threads of each worker process.
        worker: CPUs of the worker; empty: every process may run on every CPU.
        others: CPUs of the other processes.
    """

    threads: int
    worker: Cpus = frozenset()
    others: Cpus = frozenset()


def plan_cpus(args: WorkerArgs, replica: ReplicaPlace = ONLY_REPLICA) -> CpuPlan:
    """Return the plan for the CPUs that this process may use.

    Systems without CPU affinity (macOS) get the number of threads only.
    """
    plan = assign_cpus(_cores(_allowed()), _quota(), args, replica)
    return plan if hasattr(os, "sched_setaffinity") else CpuPlan(plan.threads)


def assign_cpus(
    cores: Sequence[Cpus], quota: float, args: WorkerArgs, replica: ReplicaPlace = ONLY_REPLICA
) -> CpuPlan:
    """Assign cores to the worker and to the other processes.

    The workers of several replicas get equal shares.

    Args:
        cores: the logical CPUs of each core.
        quota: number of CPUs whose time a container may use.
        args: number of threads and processes, device, and --no-affinity.
        replica: the replica of the worker.
    """
    usable = max(1, math.floor(min(len(cores), quota)))
    spare = next((spare for minimum, spare in SPARE_CORES if usable >= minimum), 0)
    num_ranks = replica.ranks_per_machine(args.tp)
    num_processes = num_ranks * replica.num_replicas
    threads = args.worker_threads or max(1, (usable - spare) // num_processes)
    num_taken = threads * num_processes
    # If a quota grants less time than there are cores, affinity gains nothing.
    shares_all = not spare or usable < len(cores) or num_taken >= len(cores)
    if args.no_affinity or runs_on_gpu(args) or shares_all:
        return CpuPlan(threads)
    first = len(cores) - num_taken + replica.number * threads * num_ranks
    own = cores[first : first + threads * num_ranks]
    return CpuPlan(threads, _union(own), _union(cores[:-num_taken]))


def num_usable_cores() -> int:
    """Return the number of cores whose time this process may use, at least 1."""
    return max(1, math.floor(min(len(_cores(_allowed())), _quota())))


def runs_on_gpu(args: WorkerArgs) -> bool:
    """Return whether the worker will run on a GPU, as far as is known before torch is loaded."""
    return args.device not in ("cpu", "auto") or (args.device == "auto" and GPU_DEVICE.exists())


def pin_to(cpus: Cpus) -> None:
    """Pin this process, and the threads that it starts from now on, to CPUs; none: any CPU."""
    if cpus:
        os.sched_setaffinity(0, cpus)


def _union(cores: Iterable[Cpus]) -> Cpus:
    return frozenset().union(*cores)


def _allowed() -> Cpus:
    if sys.platform == "linux":
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def _cores(allowed: Cpus) -> list[Cpus]:
    """Return the allowed CPUs of each core."""
    cores = dict.fromkeys(_siblings(cpu) & allowed for cpu in sorted(allowed))
    return list(cores)


def _siblings(cpu: int) -> Cpus:
    try:
        text = (TOPOLOGY / f"cpu{cpu}/topology/thread_siblings_list").read_text()
        return frozenset(parse_cpus(text)) | {cpu}
    except (OSError, ValueError):
        return frozenset((cpu,))


def parse_cpus(text: str) -> list[int]:
    """Parse a list of CPUs as Linux writes it, such as 0-2,8. Raise ValueError for other text."""
    cpus: list[int] = []
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        cpus += range(int(first), int(last or first) + 1)
    return cpus


def format_cpus(cpus: Cpus) -> str:
    """Write CPUs as Linux does, such as 0-2,8."""
    runs: list[list[int]] = []
    for cpu in sorted(cpus):
        if runs and runs[-1][-1] == cpu - 1:
            runs[-1].append(cpu)
        else:
            runs.append([cpu])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _quota() -> float:
    """Return the number of CPUs whose time a container may use; infinite outside of one."""
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
