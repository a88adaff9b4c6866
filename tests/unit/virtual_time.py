"""An event loop whose clock jumps: an hour of waiting takes no time, and a hang is seen at once."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Stuck(AssertionError):
    """No timer is set and nothing is ready: what is awaited now never comes."""


class VirtualLoop(asyncio.SelectorEventLoop):
    """Runs what is ready; when nothing is, its clock jumps to the next timer."""

    def __init__(self) -> None:
        super().__init__()
        self._virtual_time = 0.0
        self.errors: list[str] = []
        self._select = self._selector.select  # type: ignore[attr-defined]
        self._selector.select = self._jump  # type: ignore[attr-defined]
        self.set_exception_handler(lambda _, what: self.errors.append(repr(what)))

    def time(self) -> float:
        return self._virtual_time

    def _jump(self, timeout: float | None) -> Any:
        if timeout is None:
            waiting = "\n".join(str(task) for task in asyncio.all_tasks(self))
            raise Stuck(f"nothing will ever happen any more; waiting:\n{waiting}")
        self._virtual_time += timeout
        return self._select(0)


def run(work: Coroutine[Any, Any, T]) -> T:
    """asyncio.run in virtual time. Errors of callbacks, and those that no task took, are raised."""
    loop = VirtualLoop()
    try:
        result = loop.run_until_complete(work)
        left = asyncio.all_tasks(loop)
        assert not left, f"tasks are left: {left}"
        loop.run_until_complete(loop.shutdown_asyncgens())
    finally:
        loop.close()
    assert not loop.errors, loop.errors
    return result
