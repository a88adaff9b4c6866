"""Sends the results of steps to the scheduler."""

import queue
import threading
from collections.abc import Callable

from quadriga.wire.worker import ResultMessage

Wait = Callable[[], ResultMessage]  # waits for a result, unless it is there


class ResultSender:
    """Sends results at once: for steps on a CPU, which have ended when they are launched."""

    def __init__(self, send: Callable[[ResultMessage], None]) -> None:
        self._send = send

    def send(self, wait: Wait) -> None:
        """Send what `wait` returns, now or later, in the order of the calls."""
        self._send(wait())

    def close(self) -> None:
        """Wait until everything is sent."""


class AsyncResultSender(ResultSender):
    """Waits for steps on a GPU in a thread, while the next ones are launched.

    Args:
        send: sends a result; called in the thread.
        prepare: called first in the thread.
        fail: takes the first exception of `wait` or `send`, after which nothing more is sent;
            called in the thread, whose exceptions nothing else would report.
    """

    def __init__(
        self,
        send: Callable[[ResultMessage], None],
        fail: Callable[[BaseException], None],
        prepare: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(send)
        self._prepare = prepare
        self._fail = fail
        self._waiting: queue.SimpleQueue[Wait | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="results", daemon=True)
        self._thread.start()

    def send(self, wait: Wait) -> None:
        self._waiting.put(wait)

    def close(self) -> None:
        self._waiting.put(None)
        self._thread.join()

    def _run(self) -> None:
        try:
            self._prepare()
            while (wait := self._waiting.get()) is not None:
                self._send(wait())
        except BaseException as error:  # a panic of the grammars' library is no Exception
            self._fail(error)
