"""Wait for conditions that other processes, threads or tasks bring about."""

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
POLL_INTERVAL_S = 0.01


def wait_until(
    condition: Callable[[], T], seconds: float, complaint: Callable[[], str] = lambda: ""
) -> T:
    """Poll a condition and return its first true value; fail after `seconds`.

    Args:
        condition: Called until its value is true.
        seconds: Bound on the time.
        complaint: Returns a text for the failure.
    """
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {seconds} s. {complaint()}"
        time.sleep(POLL_INTERVAL_S)
    return value


async def wait_until_async(
    condition: Callable[[], T], seconds: float, complaint: Callable[[], str] = lambda: ""
) -> T:
    """Do as wait_until on an event loop."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {seconds} s. {complaint()}"
        await asyncio.sleep(POLL_INTERVAL_S)
    return value
