"""The replicas that have joined: what is known of each, which live, and what they report."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec

from quadriga.wire.sockets import Outbox
from quadriga.wire.to_detok import MovableChoice
from tokenizer_proc.replicas.placed import RouterKey, Run
from tokenizer_proc.replicas.router import Router


@dataclass(slots=True)
class ReplicaState:
    """What is known of a replica.

    Attributes:
        outbox: to its scheduler.
        dead: its processes that are being restarted.
        is_lost: it has ended for good.
        is_known: it has said which requests it holds, since this frontend began. Before, nothing
            that it sends to a frontend that replaces another one counts: it may be older.
        is_held: it gets no new requests until it has been restarted.
        recall: number of the recall that it has not answered; 0: none. It is sent no request
            meanwhile, so that the answer is about all that it was sent.
        is_cut: a link to it has broken; nothing that it sends counts until it has restated all.
        has_drained: it has nothing left after the last Drain.
        num_waiting: length of its waiting queue, as it was last reported.
        wait_s: expected wait of one more request there; None while its queue is far from full.
        runs: the choices that its scheduler has, by its numbers.
        strays: those of them that it does not own: another replica does, or the request is over.
        movable: those whose prompts it has computed for other replicas, by its numbers.
    """

    outbox: Outbox
    dead: set[str] = field(default_factory=set)
    is_lost: bool = False
    is_known: bool = False
    is_held: bool = False
    recall: int = 0
    is_cut: bool = False
    has_drained: bool = False
    num_waiting: int = 0
    wait_s: float | None = None
    runs: dict[int, Run] = field(default_factory=dict)
    strays: dict[int, Run] = field(default_factory=dict)
    movable: dict[int, MovableChoice] = field(default_factory=dict)

    @property
    def is_running(self) -> bool:
        """Whether all of its processes run, and none is about to be restarted."""
        return not (self.dead or self.is_held)


class ReplicaSet:
    """Replicas by their numbers.

    Args:
        size: largest number of replicas, each of which joins before it gets requests.
        router: is kept informed of which of them take requests.

    Attributes:
        size: largest number of replicas.
    """

    def __init__(self, size: int, router: Router[RouterKey]) -> None:
        self.size = size
        self._router = router
        self._states: dict[int, ReplicaState] = {}
        self.set_up()

    def __getitem__(self, number: int) -> ReplicaState:
        """Return a replica that has joined, also one that is lost."""
        return self._states[number]

    def find_live(self, number: int) -> ReplicaState | None:
        """Return a replica that has joined and is not lost, or None."""
        state = self._states.get(number)
        return None if state is None or state.is_lost else state

    def live(self) -> Iterator[tuple[int, ReplicaState]]:
        """Yield the numbers and states of the replicas that are not lost."""
        return ((n, state) for n, state in self._states.items() if not state.is_lost)

    def join(self, number: int, outbox: Outbox) -> None:
        """Add a replica, of which an earlier run may be lost. outbox: to its scheduler."""
        self._states[number] = ReplicaState(outbox)
        self.set_up()

    @property
    def answering(self) -> list[int]:
        """Numbers of the replicas that run, whose answers to a question come; without any, of all.

        A scheduler answers without its worker, too.
        """
        live = list(self.live())
        return [n for n, state in live if not state.dead] or [n for n, _ in live]

    def broadcast(self, message: msgspec.Struct) -> None:
        """Send a message to every scheduler."""
        for _, state in self.live():
            state.outbox.send(message)

    def set_up(self) -> None:
        """Give new requests to the replicas that run; without any, to those that come back.

        None goes to a replica that has not answered a recall.
        """
        has_running = any(state.is_running for _, state in self.live())
        for number in range(self.size):
            state = self.find_live(number)
            is_up = (
                state is not None
                and not state.recall
                and (state.is_running or not has_running)
            )  # fmt: skip
            self._router.set_up(number, is_up)

    @property
    def all_known(self) -> bool:
        """Whether each has said which requests it holds."""
        return all(state.is_known for _, state in self.live())

    @property
    def have_drained(self) -> bool:
        """Whether none has anything left after the last Drain."""
        return all(state.has_drained for _, state in self.live())

    @property
    def queue(self) -> tuple[int, float | None]:
        """Length of all waiting queues together, and the shortest wait that one more would have.

        Both are as they were last reported; the wait is None while some queue is far from full.
        """
        states = [state for state in self._states.values() if not state.is_lost]
        waits = [state.wait_s for state in states if state.wait_s is not None]
        has_wait = bool(waits) and len(waits) == len(states)
        return sum([state.num_waiting for state in states]), min(waits) if has_wait else None
