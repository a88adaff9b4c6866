"""What the scheduler of one replica among several reports with each step."""

from collections.abc import Iterable

from quadriga.wire.messages.arrays import pack_ids
from quadriga.wire.messages.replica_news import EndedRequest, HeldChoice, ReplicaNews
from scheduler_proc.state.kv_cache import KVCache
from scheduler_proc.state.page_changes import PageChanges
from scheduler_proc.state.request import Request


class ReplicaReport:
    """Gather what the frontend has to know beside the texts.

    Attributes:
        restates: the next report does not build on earlier ones.
        frontend: as in ReplicaNews.
    """

    def __init__(self) -> None:
        self._changes: PageChanges | None = None
        self.restates = True
        self.frontend = 0

    def watch(self, kv: KVCache) -> None:
        """Report the pages of a new, empty pool from now on."""
        self._changes = PageChanges(kv.page_size)
        kv.tree.observers.append(self._changes)
        self.restates = True

    def restate(self) -> None:
        """Report everything, for a frontend or detokenizer that knows nothing."""
        if self._changes is not None:
            self._changes.restate()
        self.restates = True

    def take(
        self, kv: KVCache, live: Iterable[Request], ended: Iterable[EndedRequest]
    ) -> ReplicaNews:
        """Return the report, and begin a new one.

        Args:
            kv: the pool.
            live: all open requests.
            ended: the ended requests that can be replayed.
        """
        added, evicted = (b"", b"") if self._changes is None else self._changes.take()
        restates, self.restates = self.restates, False
        if not restates:
            return ReplicaNews(added, evicted, kv.num_available)
        held = [_held(request) for request in live]
        return ReplicaNews(added, b"", kv.num_available, True, held, list(ended), self.frontend)


def _held(request: Request) -> HeldChoice:
    return HeldChoice(
        request.seq,
        request.client,
        request.request_id,
        request.index,
        pack_ids(request.generated),
        request.first_token_at,
        request.placement,
    )
