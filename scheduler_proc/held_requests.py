"""Requests that are held back until the worker has what they need: a grammar, or an adapter.

The worker keeps a grammar until a ForgetGrammar arrives, so that no request loses its grammar.
"""

import logging
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Generic, NamedTuple, TypeVar

from quadriga.wire.adapter import AdapterRef
from quadriga.wire.client import InfoValues
from quadriga.wire.sockets import Sender
from quadriga.wire.worker import (
    NO_ADAPTER,
    AdapterReady,
    CompileGrammar,
    EvictAdapter,
    ForgetAdapter,
    ForgetGrammar,
    GrammarReady,
    LoadAdapter,
)
from scheduler_proc.state.request import Request, RequestStatus

KeyT = TypeVar("KeyT")


class HeldRequests(Generic[KeyT]):
    """Requests by what they wait for; what has been waited for longest comes first."""

    def __init__(self) -> None:
        self._held: dict[KeyT, dict[int, Request]] = {}

    def __iter__(self) -> Iterator[Request]:
        """Yield the requests that are held back."""
        return chain.from_iterable(held.values() for held in self._held.values())

    @property
    def num_waiting(self) -> int:
        """Number of requests that are held back."""
        return sum(map(len, self._held.values())) if self._held else 0

    def _hold(self, key: KeyT, request: Request) -> None:
        self._held.setdefault(key, {})[request.seq] = request

    def _is_held(self, key: KeyT, request: Request) -> bool:
        return request.seq in self._held.get(key, ())

    def _release(self, key: KeyT) -> list[Request]:
        """Return the requests that wait for this, which are held back no longer."""
        return list(self._held.pop(key, {}).values())


MAX_UNUSED = 128  # grammars that the worker keeps for requests to come


class GrammarQueue(HeldRequests[bytes]):
    """Hold requests back until the worker has compiled their grammar."""

    def __init__(self, worker: Sender) -> None:
        super().__init__()
        self._worker = worker
        self._num_users: dict[bytes, int] = {}
        self._unused: OrderedDict[bytes, None] = OrderedDict()

    def holds(self, request: Request) -> bool:
        """Return whether a request is held back."""
        grammar = request.grammar
        return grammar is not None and self._is_held(grammar.key, request)

    def forget_all(self) -> None:
        """Forget everything: a new worker has no grammar."""
        self._num_users.clear()
        self._held.clear()
        self._unused.clear()

    def add(self, request: Request) -> bool:
        """Take in a request that has a grammar. Return whether it has to wait for the worker."""
        grammar = request.grammar
        assert grammar is not None
        if grammar.key not in self._num_users:
            self._num_users[grammar.key] = 0
            self._held[grammar.key] = {}
            self._worker.send(CompileGrammar(grammar))
        self._num_users[grammar.key] += 1
        self._unused.pop(grammar.key, None)
        if grammar.key not in self._held:
            return False
        self._held[grammar.key][request.seq] = request
        return True

    def on_ready(self, ready: GrammarReady) -> list[Request]:
        """Return the requests that have waited for a grammar; none for one that was forgotten."""
        if ready.key not in self._held:
            return []
        requests = self._release(ready.key)
        if ready.error:
            del self._num_users[ready.key]
        elif not self._num_users[ready.key]:
            self._keep_unused(ready.key)
        return requests

    def remove(self, request: Request) -> None:
        """Remove a request that ended, wherever it stands."""
        grammar = request.grammar
        if grammar is None or grammar.key not in self._num_users:
            return
        self._num_users[grammar.key] -= 1
        if grammar.key in self._held:
            self._held[grammar.key].pop(request.seq, None)
        elif not self._num_users[grammar.key]:
            self._keep_unused(grammar.key)

    def _keep_unused(self, key: bytes) -> None:
        self._unused[key] = None
        if len(self._unused) > MAX_UNUSED:
            oldest, _ = self._unused.popitem(last=False)
            del self._num_users[oldest]
            self._worker.send(ForgetGrammar(oldest))


# While adapters wait for a place, so many requests for each place may begin with loaded ones. Then
# the place with the fewest requests is closed.
MAX_OVERTAKEN_A_PLACE = 2


@dataclass(slots=True, eq=False)
class _Place:
    """A place of the worker, and the adapter in it.

    Attributes:
        number: of the place.
        was_in_memory: no files were read for it.
        is_ready: the worker has loaded the adapter.
        is_closing: its further requests wait, so that another adapter gets the place.
        is_dropped: the adapter has no name any more: it leaves with its last request.
        users: the open requests that have the adapter, by their numbers.
    """

    number: int
    adapter: AdapterRef
    was_in_memory: bool
    is_ready: bool = False
    is_closing: bool = False
    is_dropped: bool = False
    users: dict[int, Request] = field(default_factory=dict)

    @property
    def is_idle(self) -> bool:
        """Whether no request needs the adapter."""
        return self.is_ready and not self.users


class AdapterMoves(NamedTuple):
    """Requests that leave the core's queue, as others need the place, and such that enter it."""

    leaving: list[Request]
    entering: list[Request]


class AdapterQueue(HeldRequests[str]):
    """Hold requests back until the worker has loaded their adapter.

    The worker has a number of places. A wanted adapter gets a free one, else the place of the
    adapter that has not been needed for longest, which stays in the worker's memory: it needs no
    files when it gets a place again. The memory has room for the adapters of all places, and
    perhaps for more; the one in no place that has not been needed for longest leaves it.

    Where requests need all places, adapters wait in the order of their first requests; a loaded
    adapter with a stream of new requests cannot keep them waiting for long, see
    MAX_OVERTAKEN_A_PLACE. A pinned adapter keeps its place, and gets one without requests.

    Args:
        worker: the link to the worker.
        num_places: of the worker.
        max_in_memory: adapters in its memory, at least as many as places.
    """

    def __init__(self, worker: Sender, num_places: int, max_in_memory: int) -> None:
        super().__init__()
        self._worker = worker
        self._num_places = num_places
        self._max_in_memory = max_in_memory
        self._session: int | None = None  # None: there is no worker yet
        self._places: OrderedDict[str, _Place] = OrderedDict()  # the longest unused first
        # All that the worker has read, those in places among them; the longest unused first.
        self._memory: OrderedDict[str, AdapterRef] = OrderedDict()
        self._pinned: dict[str, AdapterRef] = {}  # fewer than places
        self._free: list[int] = []
        self._num_overtaken = 0
        self._num_loads = 0
        self._num_memory_loads = 0
        self._load_s = 0.0

    def begin(self, session: int) -> None:
        """Forget everything: a new worker has no adapter."""
        self._session = session
        self._places.clear()
        self._memory.clear()
        self._held.clear()
        self._free = list(reversed(range(self._num_places)))
        self._num_overtaken = 0
        self._load_next()

    def name_of(self, adapter_id: str) -> str | None:
        """Return the name of a loaded adapter; None where the worker has none of this id."""
        place = self._places.get(adapter_id)
        return None if place is None else place.adapter.name

    # --- requests ---------------------------------------------------------------------------------

    def holds(self, request: Request) -> bool:
        """Return whether a request is held back."""
        adapter = request.adapter
        return adapter is not None and self._is_held(adapter.id, request)

    def add(self, request: Request) -> bool:
        """Take in a request that has an adapter. Return whether it has to wait."""
        adapter = request.adapter
        assert adapter is not None
        place = self._places.get(adapter.id)
        if place is not None:
            place.is_dropped = False  # it has a name again
        if place is not None and place.is_ready and not place.is_closing:
            self._use(place, request)
            if self._waiting_adapters():
                self._num_overtaken += 1
                self._close_if_overtaken()
            return False
        self._hold(adapter.id, request)
        if place is None:
            self._load_next()
        return True

    def remove(self, request: Request) -> None:
        """Remove a request that ended, wherever it stands."""
        adapter = request.adapter
        if adapter is None:
            return
        held = self._held.get(adapter.id)
        if held is not None and held.pop(request.seq, None) is not None and not held:
            del self._held[adapter.id]
        place = self._places.get(adapter.id)
        if place is not None and place.users.pop(request.seq, None) is not None:
            self._on_fewer_users(place)

    def settle(self) -> AdapterMoves:
        """Return which requests have to leave the queue of the core, and which can enter it.

        The lifecycle calls it after each of the other methods.
        """
        leaving: list[Request] = []
        for place in self._closing_places():
            if self._waiting_adapters() and not self._is_pinned(place):
                leaving += self._take_back(place)
        entering: list[Request] = []
        for place in self._closing_places():
            if not self._waiting_adapters() or self._is_pinned(place):
                place.is_closing = False
                entering += self._begin_held(place)
        return AdapterMoves(leaving, entering)

    def _closing_places(self) -> list[_Place]:
        return [place for place in self._places.values() if place.is_closing]

    def _take_back(self, place: _Place) -> list[Request]:
        """Hold back the requests of a closing place that have not begun, and return them."""
        waiting = [r for r in place.users.values() if r.status is RequestStatus.WAITING]
        for request in waiting:
            del place.users[request.seq]
            request.adapter_place = NO_ADAPTER
            self._hold(place.adapter.id, request)
        if waiting:
            self._on_fewer_users(place)
        return waiting

    def _begin_held(self, place: _Place) -> list[Request]:
        """Let the requests that were held back have the place, and return them."""
        requests = self._release(place.adapter.id)
        for request in requests:
            self._use(place, request)
        return requests

    # --- the worker -------------------------------------------------------------------------------

    def on_ready(self, ready: AdapterReady) -> list[Request]:
        """Return the requests that have waited for an adapter; none for one that was forgotten."""
        place = self._places.get(ready.id)
        if place is None or place.number != ready.place:
            return []
        if ready.error:
            requests = self._release(ready.id)
            del self._places[ready.id]
            self._free.append(place.number)
            self._evict(ready.id)
            if self._pinned.pop(ready.id, None) is not None:
                logging.warning("a pinned adapter is not loaded: %s", ready.error)
        else:
            place.is_ready = True
            self._num_loads += 1
            self._num_memory_loads += place.was_in_memory
            self._load_s += ready.seconds
            requests = self._begin_held(place)
        self._load_next()
        return requests

    def drop(self, ids: list[str]) -> None:
        """Free the memory of adapters, at once or after their last requests."""
        for adapter_id in ids:
            place = self._places.get(adapter_id)
            if place is not None:
                place.is_dropped = True
                self._on_fewer_users(place)
            elif adapter_id in self._memory:
                self._evict(adapter_id)

    def pin(self, adapters: list[AdapterRef]) -> None:
        """Let these adapters, and no others, keep their places. They are loaded as there is room.

        One that cannot be loaded is not pinned any more.
        """
        self._pinned = {adapter.id: adapter for adapter in adapters}
        for place in filter(self._is_pinned, self._places.values()):
            place.is_dropped = False
        self._load_next()

    def info(self) -> InfoValues:
        """Return the counters and gauges, as docs/protocol.md lists them."""
        loaded = [place.adapter.name for place in self._places.values() if place.is_ready]
        running = [place.adapter.name for place in self._places.values() if place.users]
        waiting = {r.adapter.name for r in self if r.adapter is not None}
        return {
            "max": self._num_places,
            "max_in_memory": self._max_in_memory,
            "loaded": loaded,
            "in_memory": [adapter.name for adapter in self._memory.values()],
            "pinned": [adapter.name for adapter in self._pinned.values()],
            "running": running,
            "waiting": sorted(waiting),
            "loads": self._num_loads,
            "memory_loads": self._num_memory_loads,
            "load_seconds": self._load_s,
        }

    # --- places -----------------------------------------------------------------------------------

    def _use(self, place: _Place, request: Request) -> None:
        place.users[request.seq] = request
        request.adapter_place = place.number
        self._places.move_to_end(place.adapter.id)
        self._memory.move_to_end(place.adapter.id)

    def _on_fewer_users(self, place: _Place) -> None:
        if place.users or not place.is_ready:
            return
        if place.is_dropped:
            self._forget(place)
            self._evict(place.adapter.id)
        self._load_next()

    def _waiting_adapters(self) -> list[str]:
        """Return the ids of the adapters that have requests and no place, the first one first."""
        return [adapter_id for adapter_id in self._held if adapter_id not in self._places]

    def _is_pinned(self, place: _Place) -> bool:
        return place.adapter.id in self._pinned

    def _wanted_adapters(self) -> Iterator[AdapterRef]:
        """Yield the adapters that are to get places: of requests, then those that are pinned."""
        for adapter_id in self._waiting_adapters():
            adapter = next(iter(self._held[adapter_id].values())).adapter
            assert adapter is not None
            yield adapter
        yield from [one for one in self._pinned.values() if one.id not in self._places]

    def _load_next(self) -> None:
        """Give adapters places, as far as there are free or idle ones."""
        if self._session is None:
            return
        for adapter in self._wanted_adapters():
            if not self._free:
                places = self._places.values()
                idle = next((p for p in places if p.is_idle and not self._is_pinned(p)), None)
                if idle is None:
                    return
                self._forget(idle)
            was_in_memory = adapter.id in self._memory
            if not was_in_memory:
                self._make_room()
                self._memory[adapter.id] = adapter
            place = _Place(self._free.pop(), adapter, was_in_memory)
            self._places[adapter.id] = place
            self._num_overtaken = 0
            self._worker.send(LoadAdapter(adapter, place.number, self._session))

    def _forget(self, place: _Place) -> None:
        assert self._session is not None
        del self._places[place.adapter.id]
        self._free.append(place.number)
        if place.adapter.id in self._held:  # it was closed: its requests wait for their turn
            self._held[place.adapter.id] = self._held.pop(place.adapter.id)
        self._worker.send(ForgetAdapter(place.number, self._session))

    def _make_room(self) -> None:
        """Make room in memory for one more adapter, which is about to get a place."""
        if len(self._memory) >= self._max_in_memory:
            unused = [adapter_id for adapter_id in self._memory if adapter_id not in self._places]
            self._evict(next((one for one in unused if one not in self._pinned), unused[0]))

    def _evict(self, adapter_id: str) -> None:
        """Free the memory of an adapter that has no place."""
        assert self._session is not None
        del self._memory[adapter_id]
        self._worker.send(EvictAdapter(adapter_id, self._session))

    def _close_if_overtaken(self) -> None:
        """Close the place with the fewest requests if the waiting adapters were overtaken."""
        if self._num_overtaken < MAX_OVERTAKEN_A_PLACE * self._num_places:
            return
        places = [p for p in self._places.values() if p.is_ready and not self._is_pinned(p)]
        if not places or any(place.is_closing for place in places):
            return
        min(places, key=lambda place: len(place.users)).is_closing = True
