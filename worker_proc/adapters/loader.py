"""Read adapters in a thread while steps run, and put them into the engine between steps."""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quadriga.errors import QuadrigaError
from quadriga.wire.adapter import AdapterRef
from quadriga.wire.worker import AdapterReady, LoadAdapter

if TYPE_CHECKING:
    from worker_proc.adapters.change import Adapter


@dataclass(frozen=True, slots=True, eq=False)
class _Load:
    """A load that has begun. `adapter` raises what the reader raises."""

    adapter: "Future[Adapter]"


class AdapterLoader:
    """Loads the adapters that the scheduler asks for.

    All methods are called by the thread that runs the steps.

    Args:
        read: reads an adapter; it may take long. It raises QuadrigaError.
        set_adapter: of the engine.
        send: sends AdapterReady, from the thread that reads; None: nothing is sent, since another
            rank answers.
        prepare: called first in the thread that reads.
    """

    def __init__(
        self,
        read: "Callable[[AdapterRef], Adapter]",
        set_adapter: "Callable[[int, Adapter | None], None]",
        send: Callable[[AdapterReady], None] | None,
        prepare: Callable[[], None] = lambda: None,
    ) -> None:
        self._read = read
        self._set_adapter = set_adapter
        self._send = send
        self._thread = ThreadPoolExecutor(1, "adapters", prepare)
        self._loads: dict[int, _Load] = {}
        self._places: set[int] = set()  # that have an adapter in the engine

    def load(self, message: LoadAdapter) -> None:
        """Begin to load an adapter."""
        adapter: Future[Adapter] = Future()
        self._loads[message.place] = _Load(adapter)
        self._thread.submit(self._run, message, adapter)

    def forget(self, place: int) -> None:
        """Free a place. What is being loaded for it is dropped."""
        self._loads.pop(place, None)
        if place in self._places:
            self._places.remove(place)
            self._set_adapter(place, None)

    def forget_all(self) -> None:
        """Free all places."""
        for place in {*self._loads, *self._places}:
            self.forget(place)

    def take(self, places: set[int]) -> None:
        """Put adapters into the engine that new slots have. Rank 0 has said that they are ready.

        Raises:
            QuadrigaError: this rank cannot load an adapter that rank 0 has loaded.
        """
        for place in places & self._loads.keys():
            adapter = self._loads.pop(place).adapter.result()
            self._set_adapter(place, adapter)
            self._places.add(place)

    def _run(self, message: LoadAdapter, result: "Future[Adapter]") -> None:
        began_at, error = time.monotonic(), ""
        try:
            result.set_result(self._read(message.adapter))
        except QuadrigaError as failure:
            error = str(failure)
            result.set_exception(failure)
        except Exception as failure:  # of a library that reads the files
            error = f"adapter {message.adapter.name!r} cannot be read: {failure}"
            result.set_exception(failure)
        if self._send is not None:
            seconds = time.monotonic() - began_at
            ref, place, session = message.adapter, message.place, message.session
            self._send(AdapterReady(ref.id, place, error, session, seconds))
