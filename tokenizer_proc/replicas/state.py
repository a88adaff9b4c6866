"""What the frontend knows of a replica."""

from dataclasses import dataclass, field

from quadriga.wire.sockets import Outbox
from tokenizer_proc.replicas.placed import Run


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

    @property
    def is_running(self) -> bool:
        """Whether all of its processes run, and none is about to be restarted."""
        return not (self.dead or self.is_held)
