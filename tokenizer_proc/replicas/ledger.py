"""The load of each replica, counted from what is sent to it and what comes back."""

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

KeyT = TypeVar("KeyT", bound=Hashable)

# What an open choice costs the others, in prompt tokens; docs/scale.md has the measurement.
ROW_TOKENS = 16
# Added to the cost of a replica whose waiting queue is full: any other one is better.
QUEUE_IS_FULL = 1e12


@dataclass(slots=True)
class ReplicaLoad:
    """What one replica has to do.

    Attributes:
        num_prefill_tokens: tokens of prompts that are not computed yet, as far as is known.
        num_open: choices that have not ended.
        num_waiting: choices that have no token yet.
        num_available: KV pages that could be allocated when it last reported; -1: not known.
    """

    num_prefill_tokens: int = 0
    num_open: int = 0
    num_waiting: int = 0
    num_available: int = -1


@dataclass(slots=True)
class _Entry:
    replica: int
    num_prefill_tokens: int
    num_open: int
    started: set[int] = field(default_factory=set)
    ended: set[int] = field(default_factory=set)


class Ledger(Generic[KeyT]):
    """Count requests from the choice of their replica to the end of their last choice.

    Args:
        num_replicas: number of replicas.
        max_waiting: choices that a replica's waiting queue takes.

    Attributes:
        loads: one for each replica.
        costs: the load of each replica, in prompt tokens.
        num_open: open choices of all replicas.
    """

    def __init__(self, num_replicas: int, max_waiting: int) -> None:
        self._max_waiting = max_waiting
        self._entries: dict[KeyT, _Entry] = {}
        self.loads = [ReplicaLoad() for _ in range(num_replicas)]
        self.costs = [0.0] * num_replicas
        self.num_open = 0

    def __contains__(self, key: KeyT) -> bool:
        return key in self._entries

    def open(self, key: KeyT, replica: int, num_prefill_tokens: int, num_choices: int) -> None:
        """Count a request that is sent to a replica; one that is open moves there."""
        self.close(key)
        self._entries[key] = _Entry(replica, num_prefill_tokens, num_choices)
        self._add(replica, num_prefill_tokens, num_choices, num_choices)

    def start(self, key: KeyT, index: int) -> bool:
        """Count the first token of a choice. Return whether it is the request's first one."""
        entry = self._entries.get(key)
        if entry is None or index in entry.started or index in entry.ended:
            return False
        # A new frontend may know of fewer choices than there are.
        if len(entry.started) >= entry.num_open:
            return False
        is_first = not entry.started
        entry.started.add(index)
        num_prefill_tokens, entry.num_prefill_tokens = entry.num_prefill_tokens, 0
        self._add(entry.replica, -num_prefill_tokens, 0, -1)
        return is_first

    def end(self, key: KeyT, index: int) -> None:
        """Count the end of a choice, which may have no token."""
        entry = self._entries.get(key)
        if entry is None or index in entry.ended:
            return
        entry.ended.add(index)
        if len(entry.ended) >= entry.num_open:
            self.close(key)

    def close(self, key: KeyT) -> None:
        """Take a request out, however far it is."""
        entry = self._entries.pop(key, None)
        if entry is not None:
            num_waiting = entry.num_open - len(entry.started)
            self._add(entry.replica, -entry.num_prefill_tokens, -entry.num_open, -num_waiting)

    def set_available(self, replica: int, num_pages: int) -> None:
        """Take in how many KV pages of a replica could be allocated."""
        self.loads[replica].num_available = num_pages

    def _add(self, replica: int, num_prefill_tokens: int, num_open: int, num_waiting: int) -> None:
        load = self.loads[replica]
        load.num_prefill_tokens += num_prefill_tokens
        load.num_open += num_open
        self.num_open += num_open
        load.num_waiting += num_waiting
        cost = float(load.num_prefill_tokens + ROW_TOKENS * load.num_open)
        if load.num_waiting >= self._max_waiting:
            cost += QUEUE_IS_FULL
        self.costs[replica] = cost
