"""Read adapters in a thread while steps run, and put them into the engine between steps."""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

from quadriga.errors import QuadrigaError
from quadriga.wire.adapter import AdapterRef
from quadriga.wire.worker import AdapterReady, EvictAdapter, ForgetAdapter, LoadAdapter

if TYPE_CHECKING:
    from worker_proc.adapters.change import Adapter


class AdapterLoader:
    """Loads the adapters that the scheduler asks for, and keeps them in memory until it says so.

    All methods are called by the thread that runs the steps.

    Args:
        read: reads an adapter to host memory; it may take long. It raises QuadrigaError.
        upload: copies what was read to the engine's device. It raises QuadrigaError.
        set_adapter: of the engine.
        send: sends AdapterReady, from the thread that reads; None: nothing is sent, since another
            rank answers.
        prepare: called first in the thread that reads.
    """

    def __init__(
        self,
        read: "Callable[[AdapterRef], Adapter]",
        upload: "Callable[[Adapter], Adapter]",
        set_adapter: "Callable[[int, Adapter | None], None]",
        send: Callable[[AdapterReady], None] | None,
        prepare: Callable[[], None] = lambda: None,
    ) -> None:
        self._read = read
        self._upload = upload
        self._set_adapter = set_adapter
        self._send = send
        self._thread = ThreadPoolExecutor(1, "adapters", prepare)
        # By the ids of the adapters, and by places. A future raises what reading has raised.
        self._memory: dict[str, Future[Adapter]] = {}
        self._loads: dict[int, Future[Adapter]] = {}
        self._places: set[int] = set()  # that have an adapter in the engine

    def handle(self, message: LoadAdapter | ForgetAdapter | EvictAdapter) -> None:
        """Do what a message asks for."""
        match message:
            case LoadAdapter():
                self.load(message)
            case ForgetAdapter():
                self.forget(message.place)
            case EvictAdapter():
                self.evict(message.id)

    def load(self, message: LoadAdapter) -> None:
        """Begin to load an adapter."""
        in_memory = self._memory.setdefault(message.adapter.id, Future())
        load: Future[Adapter] = Future()
        self._loads[message.place] = load
        self._thread.submit(self._run, message, in_memory, load)

    def forget(self, place: int) -> None:
        """Free a place. What is being loaded for it is dropped."""
        self._loads.pop(place, None)
        if place in self._places:
            self._places.remove(place)
            self._set_adapter(place, None)

    def evict(self, adapter_id: str) -> None:
        """Free the memory of an adapter that has no place."""
        self._memory.pop(adapter_id, None)

    def forget_all(self) -> None:
        """Free all places, and the memory."""
        self._memory.clear()
        for place in {*self._loads, *self._places}:
            self.forget(place)

    def take(self, places: set[int]) -> None:
        """Put adapters into the engine that new slots have. Rank 0 has said that they are ready.

        Raises:
            QuadrigaError: this rank cannot load an adapter that rank 0 has loaded.
        """
        for place in places & self._loads.keys():
            self._set_adapter(place, self._loads.pop(place).result())
            self._places.add(place)

    def _run(
        self, message: LoadAdapter, in_memory: "Future[Adapter]", load: "Future[Adapter]"
    ) -> None:
        began_at, error = time.monotonic(), ""
        try:
            if not in_memory.done():  # all loads have this thread: no other one reads it
                in_memory.set_result(self._read(message.adapter))
            load.set_result(self._upload(in_memory.result()))
        except QuadrigaError as failure:
            error = str(failure)
            load.set_exception(failure)
        except Exception as failure:  # of a library that reads the files
            error = f"adapter {message.adapter.name!r} cannot be read: {failure}"
            load.set_exception(failure)
        if self._send is not None:
            seconds = time.monotonic() - began_at
            ref, place, session = message.adapter, message.place, message.session
            self._send(AdapterReady(ref.id, place, error, session, seconds))
