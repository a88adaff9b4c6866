"""Requests that are held back until the worker has what they need, such as a grammar."""

from collections.abc import Iterator
from itertools import chain
from typing import Generic, TypeVar

from scheduler_proc.state.request import Request

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
