"""Results on their way to the scheduler."""

import queue
import threading
from collections.abc import Callable
from typing import Protocol

from quadriga.wire.messages.worker import ResultMessage

Later = Callable[[], ResultMessage]
"""Waits for a result, where it has to be waited for."""


class ResultSender(Protocol):
    def send(self, result: Later) -> None:
        """In the order of the calls."""

    def close(self) -> None:
        """All that was to be sent has been."""


class SyncResultSender:
    """Of steps that have ended when they come back."""

    def __init__(self, send: Callable[[ResultMessage], None]) -> None:
        self._send = send

    def send(self, result: Later) -> None:
        self._send(result())

    def close(self) -> None:
        return


class AsyncResultSender:
    """Of steps that still run on a card: a thread waits for them, while the next one is launched.

    fail: called in that thread with what went wrong in it, after which nothing more is sent.
    """

    def __init__(
        self, send: Callable[[ResultMessage], None], fail: Callable[[Exception], None]
    ) -> None:
        self._send, self._fail = send, fail
        self._waiting: queue.SimpleQueue[Later | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="results", daemon=True)
        self._thread.start()

    def send(self, result: Later) -> None:
        self._waiting.put(result)

    def close(self) -> None:
        self._waiting.put(None)
        self._thread.join()

    def _run(self) -> None:
        try:
            while (result := self._waiting.get()) is not None:
                self._send(result())
        except Exception as error:
            self._fail(error)
