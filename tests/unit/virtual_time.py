"""An event loop with a virtual clock: waiting takes no time, and a hang is detected at once."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Stuck(AssertionError):
    """No timer is set and no task is ready: the awaited event never happens."""


class VirtualLoop(asyncio.SelectorEventLoop):
    """Runs what is ready, and else advances its clock to the next timer."""

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
            raise Stuck(f"no timer is set; waiting:\n{waiting}")
        self._virtual_time += timeout
        return self._select(0)


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in virtual time; raise the errors of callbacks and of unawaited tasks."""
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
