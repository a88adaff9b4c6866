"""Read CPU time, memory and step counters of the processes around a run."""

import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

LOCAL_HOSTS = ("127.", "localhost", "[::1]")
BENCH = "bench client"
DRAFTED_TOKENS = "spec_decode_num_accepted_tokens_total"  # of the server's info


@dataclass(frozen=True, slots=True)
class Reading:
    """The counters at one moment: CPU seconds and resident bytes of each process."""

    time: float
    info: Mapping[str, Any]
    cpu: Mapping[str, float | None]
    memory: Mapping[str, int | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Cost:
    """The difference of two readings; None if unknown.

    Attributes:
        busy_share: share of the time in which the worker computed, 0 to 1.
        drafted_tokens: tokens that were drafted, and equal to what was sampled.
        step_gap_ms_p50: median gap in ms between one step and the next, over recent steps.
        cpu: CPU seconds of each process and its threads.
        memory: resident bytes of each process at the end; shared pages count in each.
    """

    steps: int | None
    busy_share: float | None
    step_gap_ms_p50: float | None
    step_gap_ms_p99: float | None
    cpu: dict[str, float | None]
    memory: dict[str, int | None] = field(default_factory=dict)
    drafted_tokens: int | None = None


def cost_between(before: Reading, after: Reading) -> Cost:
    """Return the cost of the run between two readings."""
    steps, busy, drafted = (
        _difference(before.info.get(name), after.info.get(name))
        for name in ("steps", "busy_seconds", DRAFTED_TOKENS)
    )
    wall = after.time - before.time
    return Cost(
        steps=None if steps is None else int(steps),
        busy_share=min(1.0, busy / wall) if busy is not None and wall > 0 else None,
        step_gap_ms_p50=after.info.get("step_gap_ms_p50"),
        step_gap_ms_p99=after.info.get("step_gap_ms_p99"),
        cpu={name: _difference(before.cpu.get(name), end) for name, end in after.cpu.items()},
        memory=dict(after.memory),
        drafted_tokens=None if drafted is None else int(drafted),
    )


def is_local(endpoint: str) -> bool:
    """Return whether the server at `endpoint` runs on this machine, so that its pids are valid."""
    return endpoint.removeprefix("tcp://").startswith(LOCAL_HOSTS)


def pids_of(info: Mapping[str, Any], endpoint: str) -> dict[str, int]:
    """Return the pids of the server's processes, if it is local, and of the bench client."""
    pids = info.get("pids") if is_local(endpoint) else None
    named = {str(name): int(pid) for name, pid in pids.items()} if isinstance(pids, dict) else {}
    return {**named, BENCH: os.getpid()}


def cpu_seconds(pids: Mapping[str, int]) -> dict[str, float | None]:
    """Return user and system seconds of each process and its threads; None if unknown."""
    return {name: _cpu_of(pid) for name, pid in pids.items()}


def resident_bytes(pids: Mapping[str, int]) -> dict[str, int | None]:
    """Return the resident bytes of each process; None if unknown."""
    return {name: _memory_of(pid) for name, pid in pids.items()}


def _difference(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else max(0.0, end - start)


def _cpu_of(pid: int) -> float | None:
    if sys.platform != "linux":
        times = _by_psutil(pid, lambda process: process.cpu_times())
        return None if times is None else float(times.user + times.system)
    try:
        return time.clock_gettime(_cpu_clock(pid))
    except OSError:
        return None


def _cpu_clock(pid: int) -> int:
    """Return the id of a process's CPU clock, as clock_getcpuclockid(3) computes it on Linux.

    /proc/PID/stat counts in ticks of 10 ms, which is too coarse for a short run.
    """
    return (~pid << 3) | 2


def _memory_of(pid: int) -> int | None:
    if sys.platform != "linux":
        memory = _by_psutil(pid, lambda process: process.memory_info())
        return None if memory is None else int(memory.rss)
    try:
        resident = Path(f"/proc/{pid}/statm").read_text().split()[1]
    except OSError:
        return None
    return int(resident) * os.sysconf("SC_PAGE_SIZE")


def _by_psutil(pid: int, ask: Callable[[Any], Any]) -> Any:
    """Ask psutil, which is optional, about a process."""
    try:
        import psutil
    except ImportError:
        return None
    try:
        return ask(psutil.Process(pid))
    except psutil.Error:
        return None
