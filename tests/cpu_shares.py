"""The CPUs that each worker of a parallel test run may use.

The kernels' threads wait for each other in loops. With two such teams on the same two cores a step
takes ten times as long as alone. So every worker of pytest-xdist, with all the servers it starts,
keeps to CPUs that no other worker uses, and torch counts only these.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

ALL_CPUS: list[int] = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
"""Empty on systems that cannot pin a process to CPUs (macOS, Windows)."""


def keep_to_own_share() -> None:
    """Pin this process to its share of the CPUs if it is one of several pytest-xdist workers."""
    name = os.environ.get("PYTEST_XDIST_WORKER", "")
    if name and ALL_CPUS:
        count = int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
        _pin(share(ALL_CPUS, int(name.removeprefix("gw")), count))


def share(cpus: Sequence[int], worker: int, num_workers: int) -> list[int]:
    """Return the CPUs of worker number `worker`: a run of neighbours, and at least one."""
    if num_workers >= len(cpus):
        return [cpus[worker % len(cpus)]]
    begin, end = (len(cpus) * n // num_workers for n in (worker, worker + 1))
    return list(cpus[begin:end])


@contextmanager
def all_cpus() -> Iterator[None]:
    """Let this process use every CPU until the block ends."""
    if not ALL_CPUS:
        yield
        return
    own = os.sched_getaffinity(0)
    _pin(ALL_CPUS)
    try:
        yield
    finally:
        _pin(own)


def _pin(cpus: Sequence[int] | set[int]) -> None:
    """Pin the threads that this process has now, and those that they start later."""
    for thread in Path("/proc/self/task").iterdir():
        try:
            os.sched_setaffinity(int(thread.name), cpus)
        except ProcessLookupError:  # the thread has just ended
            continue
