"""Limits on the time and memory that a template takes, in whichever process it runs.

A template is a program of the model's files. It must not hold up the event loop, on which short
chats are rendered, nor take the memory of the machine. A timer of the process's CPU time interrupts
it, and while it runs the address space of the process may grow by MAX_GROWTH_BYTES only, so that
one large allocation fails and not the process.
"""

import os
import resource
import signal
from collections.abc import Callable, Iterable
from types import FrameType
from typing import TypeVar

T = TypeVar("T")

MAX_GROWTH_BYTES = 256 * 1024 * 1024
# The timer fires again: what the template calls may have caught the first interruption.
_REPEAT_S = 0.05
_PAGE_BYTES = resource.getpagesize()


class TemplateRanAway(Exception):
    """A template took more time, memory or text than it may."""


class _OutOfTime(BaseException):
    """The interruption; no `except Exception` of a template's functions catches it."""


class _Timer:
    """The process's timer. Signals belong to a process, and so there is one."""

    is_armed = False
    is_installed = False
    has_fired = False

    @classmethod
    def arm(cls, seconds: float) -> None:
        if not cls.is_installed:
            signal.signal(signal.SIGVTALRM, cls._interrupt)
            cls.is_installed = True
        cls.is_armed, cls.has_fired = True, False
        signal.setitimer(signal.ITIMER_VIRTUAL, seconds, _REPEAT_S)

    @classmethod
    def disarm(cls) -> None:
        cls.is_armed = False
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)

    @classmethod
    def _interrupt(cls, _number: int, _frame: FrameType | None) -> None:
        if cls.is_armed:
            cls.has_fired = True
            raise _OutOfTime


def run_limited(work: Callable[[], T], max_cpu_s: float) -> T:
    """Return what a template's program returns.

    Args:
        work: runs the program; it is called in the main thread.
        max_cpu_s: CPU time that it may take, in seconds.

    Raises:
        TemplateRanAway: it took more time or memory.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    try:
        try:
            _Timer.arm(max_cpu_s)
            resource.setrlimit(resource.RLIMIT_AS, (_address_limit(soft, hard), hard))
            result = work()
            if _Timer.has_fired:
                raise _OutOfTime
            return result
        finally:
            _Timer.disarm()
            resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    except _OutOfTime:
        _Timer.disarm()
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        raise TemplateRanAway(f"it takes more than {max_cpu_s:.1f} s of CPU time") from None
    except MemoryError:
        megabytes = MAX_GROWTH_BYTES >> 20
        raise TemplateRanAway(f"it takes more than {megabytes} MiB of memory") from None


def join_limited(pieces: Iterable[str], max_chars: int) -> str:
    """Return the pieces of a text, joined. Raise TemplateRanAway if they are too long."""
    num_chars = 0
    parts: list[str] = []
    for piece in pieces:
        num_chars += len(piece)
        if num_chars > max_chars:
            raise TemplateRanAway(f"it writes more than {max_chars} characters")
        parts.append(piece)
    return "".join(parts)


def _address_limit(soft: int, hard: int) -> int:
    """Return the size in bytes to which the address space may grow now."""
    descriptor = os.open("/proc/self/statm", os.O_RDONLY)
    try:
        size = int(os.read(descriptor, 64).partition(b" ")[0]) * _PAGE_BYTES
    finally:
        os.close(descriptor)
    limits = [limit for limit in (soft, hard) if limit != resource.RLIM_INFINITY]
    return min(size + MAX_GROWTH_BYTES, *limits) if limits else size + MAX_GROWTH_BYTES
