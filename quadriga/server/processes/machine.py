"""What the processes use of their machine: CPU cores, malloc, open files, the C++ compiler.

If there are enough cores, the worker has its own. The limit of open files is raised at the start,
and kept out of reach of connections. The compiler makes the kernels of a CPU.
"""

import contextlib
import ctypes
import logging
import math
import os
import platform
import resource
import shlex
import shutil
import socket
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from quadriga import __version__, errors
from quadriga.server.config.engine_args import (
    NUMA_WORDS,
    ONLY_REPLICA,
    ReplicaPlace,
    WorkerArgs,
)

# Numbers of logical CPUs.
Cpus = frozenset[int]

# (cores of the machine, cores left to the other processes); with fewer, all processes share all.
SPARE_CORES = ((64, 4), (16, 2), (4, 1))
TOPOLOGY = Path("/sys/devices/system/cpu")
NUMA_NODES = Path("/sys/devices/system/node")
# A container's CPU time in microseconds per period, for cgroups v2 and v1; v1 has the period in a
# file of its own.
QUOTAS = (Path("/sys/fs/cgroup/cpu.max"), Path("/sys/fs/cgroup/cpu/cpu.cfs_quota_us"))
GPU_DEVICE = Path("/dev/nvidiactl")
MPOL_PREFERRED = 1  # from Linux's mempolicy.h
NUMA_CALLS = {"x86_64": 238, "aarch64": 237}  # numbers of the system call set_mempolicy


@dataclass(frozen=True, slots=True)
class CpuPlan:
    """Threads and CPUs of the processes.

    Attributes:
        threads: number of threads of each worker process.
        worker: CPUs of the worker; empty: every process may run on every CPU.
        others: CPUs of the other processes.
        node: number of the NUMA node that the worker's CPUs and memory are of; None: of any.
    """

    threads: int
    worker: Cpus = frozenset()
    others: Cpus = frozenset()
    node: int | None = None


def plan_cpus(args: WorkerArgs, replica: ReplicaPlace = ONLY_REPLICA) -> CpuPlan:
    """Return the plan for the CPUs that this process may use.

    Systems without CPU affinity (macOS) get the number of threads only.
    """
    cores, quota = _cores(_allowed()), _quota()
    plan = assign_cpus(cores, quota, args, replica)
    if not hasattr(os, "sched_setaffinity"):
        return CpuPlan(plan.threads)
    if quota < len(cores) or runs_on_gpu(args):
        return plan
    return plan_on_node(_nodes(cores), args, replica) or plan


def plan_on_node(
    nodes: Mapping[int, Sequence[Cpus]], args: WorkerArgs, replica: ReplicaPlace = ONLY_REPLICA
) -> CpuPlan | None:
    """Return the plan for a worker on one NUMA node, or None where its CPUs are of all nodes.

    Memory of another node is read more slowly. Replicas take the nodes in turn.

    Args:
        nodes: the cores of each node of the machine, by its number.
        args: --numa-node, threads and processes.
        replica: the replica of the worker.

    Raises:
        ConfigError: the machine has no node of the number of --numa-node.
    """
    if args.numa_node not in NUMA_WORDS and int(args.numa_node) not in nodes:
        raise errors.ConfigError(
            f"numa_node is {args.numa_node}, and the nodes with CPUs for this server are"
            f" {sorted(nodes)}"
        )
    if args.numa_node == "all" or len(nodes) < 2:
        return None
    used = list(nodes) if args.numa_node == "auto" else [int(args.numa_node)]
    plans = {}
    for place, node in enumerate(used):
        count = len(range(place, replica.num_replicas, len(used)))
        number = replica.number // len(used) if replica.number % len(used) == place else 0
        of_node = replica._replace(number=number, num_replicas=max(1, count))
        plan = assign_cpus(nodes[node], math.inf, args, of_node)
        if count and not plan.worker:
            return None  # it has fewer cores than the workers have threads
        plans[node] = plan if count else CpuPlan(0, others=_union(nodes[node]))
    mine = used[replica.number % len(used)]
    unused = _union(core for node in nodes if node not in plans for core in nodes[node])
    others = unused | _union(plan.others for plan in plans.values())
    return CpuPlan(plans[mine].threads, plans[mine].worker, others, mine)


def _nodes(cores: Sequence[Cpus]) -> dict[int, list[Cpus]]:
    """Return the cores of each NUMA node by its number; none if the system does not say them."""
    nodes: dict[int, list[Cpus]] = {}
    for directory in sorted(NUMA_NODES.glob("node[0-9]*"), key=lambda path: int(path.name[4:])):
        try:
            cpus = frozenset(parse_cpus((directory / "cpulist").read_text()))
        except (OSError, ValueError):  # a node may have memory only
            continue
        if of_node := [core for core in cores if core <= cpus]:
            nodes[int(directory.name[4:])] = of_node
    return nodes


def prefer_memory_of(node: int | None) -> None:
    """Let this process allocate memory of a NUMA node as long as the node has some; None: of any.

    A system that does not allow it allocates where a thread first writes, which is mostly the same.
    """
    call = NUMA_CALLS.get(platform.machine())
    if node is None or call is None or sys.platform != "linux":
        return
    mask = (ctypes.c_ulong * (node // 64 + 1))()
    mask[node // 64] = 1 << node % 64
    size = ctypes.c_ulong(64 * len(mask) + 1)
    if ctypes.CDLL(None, use_errno=True).syscall(call, MPOL_PREFERRED, mask, size):
        logging.info("memory is of any NUMA node: %s", os.strerror(ctypes.get_errno()))


def assign_cpus(
    cores: Sequence[Cpus], quota: float, args: WorkerArgs, replica: ReplicaPlace = ONLY_REPLICA
) -> CpuPlan:
    """Assign cores to the worker and to the other processes.

    The workers of several replicas get equal shares.

    Args:
        cores: the logical CPUs of each core.
        quota: number of CPUs whose time a container may use.
        args: number of threads and processes, and device.
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
    if runs_on_gpu(args) or shares_all:
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


# Settings of glibc's malloc; no effect with another C library.

# From glibc's malloc.h.
M_MMAP_THRESHOLD = -3
M_ARENA_MAX = -8
MMAP_BYTES = 1 << 20


def use_one_heap() -> None:
    """Make all threads share one heap. Call it before a second thread starts.

    glibc gives each thread a heap. Grammars are compiled by one thread and freed by another, which
    left holes that were never reused: each new grammar cost the worker 5 KB for good.
    """
    _set_option(M_ARENA_MAX, 1)


def map_large_blocks() -> None:
    """Map blocks of MMAP_BYTES and more separately, so that freeing them returns their memory.

    By default, glibc takes blocks of up to 32 MB from the heap once some have been freed, and a
    heap shrinks only at its end.
    """
    _set_option(M_MMAP_THRESHOLD, MMAP_BYTES)


def _set_option(option: int, value: int) -> None:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(option, value)


# At the limit of open files libzmq cannot accept a connection and retries without a pause, which
# uses up a core.

MAX_OPEN_FILES = 65_536
# Descriptors that connections leave to other uses, and as a fraction of the limit.
MIN_RESERVE = 64
RESERVED_FRACTION = 0.05
WARN_FRACTION = 0.9
WARN_EVERY_S = 60.0


def allow_open_files(wanted: int) -> int:
    """Raise the limit of this process and its children to `wanted`, as far as the system allows.

    Returns:
        The limit, which is never lowered.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    limit = wanted if hard == unlimited else min(wanted, hard)
    if soft == unlimited or soft >= limit:
        return wanted if soft == unlimited else soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    return limit


class FileWatch:
    """Closes new connections if nearly all descriptors are in use.

    Logs a warning before that, at most once a minute.
    """

    def __init__(self) -> None:
        self._limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        reserve = max(MIN_RESERVE, int(RESERVED_FRACTION * self._limit))
        self._max_descriptor = self._limit - min(reserve, self._limit // 2)
        self._warned_at = float("-inf")

    def on_accept(self, descriptor: int) -> None:
        """Check the descriptor of a new connection, which is the lowest free number."""
        if self._limit == resource.RLIM_INFINITY or descriptor < WARN_FRACTION * self._limit:
            return
        self._warn(descriptor)
        if descriptor >= self._max_descriptor:
            _shut_down(descriptor)

    def _warn(self, descriptor: int) -> None:
        now = time.monotonic()
        if now - self._warned_at >= WARN_EVERY_S:
            self._warned_at = now
            logging.warning(
                "%d of %d files are open, nearly all of them connections: from %d on new ones are"
                " closed; raise the limit (ulimit -n)",
                descriptor + 1,
                self._limit,
                self._max_descriptor,
            )


def _shut_down(descriptor: int) -> None:
    """Shut a connection down; its owner then closes it.

    If it was closed meanwhile and another connection has its number, that one is too many, too.
    """
    with contextlib.suppress(OSError), socket.fromfd(descriptor, socket.AF_INET, 0) as connection:
        connection.shutdown(socket.SHUT_RDWR)


COMPILER_VARIABLE = "CXX"


class NoCompiler(errors.ConfigError):
    """The machine has no compiler, or it cannot compile the kernels."""


def find_compiler() -> list[str]:
    """Return the C++ compiler's command. Raise NoCompiler if there is none."""
    command_line = os.environ.get(COMPILER_VARIABLE)
    if command_line is not None:
        command = shlex.split(command_line)
        if not command or shutil.which(command[0]) is None:
            raise NoCompiler(
                f"{COMPILER_VARIABLE} is {command_line!r}, which is not a command here"
            )
        return command
    for name in ("g++", "clang++", "c++"):
        if shutil.which(name) is not None:
            return [name]
    raise NoCompiler("no C++ compiler is here (g++ or clang++)")


def other_version(who: str, version: str) -> str:
    """Return why a process on another machine is refused; "" if it runs this version of quadriga.

    The messages between the processes of a server change with every version.

    Args:
        who: the process, such as "the replica at tcp://10.0.0.7:4021".
        version: its version; "" where it does not say one.
    """
    if version == __version__:
        return ""
    return (
        f"{who} runs quadriga {version or 'of an older version'}, and this machine {__version__}:"
        " install the same version on all machines"
    )
