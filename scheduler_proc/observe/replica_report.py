"""What a scheduler reports to the frontend beside the texts.

`ReplicaReport` gathers it; `PageChanges` notes which blocks of the prefix tree were added and
evicted, for the frontend's router.
"""

from collections.abc import Iterable
from itertools import chain

from quadriga.server.prefix_blocks import block_hash, pages_per_block
from quadriga.wire.packing import pack_ids
from quadriga.wire.to_detok import (
    EndedRequest,
    HeldChoice,
    MovableChoice,
    PromptWork,
    ReplicaNews,
    StoredPrompt,
)
from scheduler_proc.state.batch import RunningBatch
from scheduler_proc.state.kv_cache import KVCache
from scheduler_proc.state.kv_offload import KVOffload
from scheduler_proc.state.prefix_tree import Node
from scheduler_proc.state.request import Request


class PageChanges:
    """Hashes of the blocks whose last page was added to a tree, or evicted, since the last report.

    Args:
        page_size: tokens of a page.
    """

    def __init__(self, page_size: int) -> None:
        self._pages_per_block = pages_per_block(page_size)
        self._hashes: dict[Node, bytes] = {}
        self._added: dict[bytes, None] = {}
        self._evicted: dict[bytes, None] = {}

    def add(self, node: Node) -> None:
        """Take in that a node has a page."""
        if node.depth % self._pages_per_block:
            return
        found = self._hashes.get(node)
        if found is None:
            found = self._hashes[node] = self._hash(node)
        self._evicted.pop(found, None)
        self._added[found] = None

    def _hash(self, last: Node) -> bytes:
        keys, node = [], last
        for _ in range(self._pages_per_block):
            keys.append(node.key)
            assert node.parent is not None
            node = node.parent
        keys.reverse()
        return block_hash(self._hashes.get(node, b""), b"".join(keys))

    def evict(self, node: Node) -> None:
        """Take in that a node has lost its page."""
        found = self._hashes.get(node)
        if found is not None:
            self._added.pop(found, None)
            self._evicted[found] = None

    def forget(self, node: Node) -> None:
        """Take in that a node has left the tree."""
        self._hashes.pop(node, None)

    def take(self) -> tuple[bytes, bytes]:
        """Return the joined hashes of added and of evicted blocks, and begin a new report."""
        changes = b"".join(self._added), b"".join(self._evicted)
        self._added, self._evicted = {}, {}
        return changes

    def restate(self) -> None:
        """Let the next report hold every block of the tree, for a reader that knows nothing.

        A block without its last page is in it only where the page was lost since the last report.
        """
        self._added = dict.fromkeys(self._hashes.values())
        self._evicted = {}


class MovableRequests:
    """Find requests that another replica can go on with: their first token and pages are there.

    Each is reported once, and again where the report may be lost.
    """

    def __init__(self) -> None:
        self._reported: set[int] = set()
        self._found: list[MovableChoice] = []
        self._stored_again: set[int] = set()

    def find(self, requests: Iterable[Request], offload: KVOffload) -> bool:
        """Look for running requests that were not reported yet. Return whether there are any."""
        running = {request.seq: request for request in requests}
        self._reported.intersection_update(running)
        self._stored_again.intersection_update(running)
        self._found = []
        for seq, request in running.items():
            if seq in self._reported or not request.first_token_at:
                continue
            if offload.has_stored_prompt(request):
                self._found.append(_movable(request))
            elif seq not in self._stored_again:
                self._stored_again.add(seq)
                offload.store_again(request)
        return bool(self._found)

    def take(self) -> list[MovableChoice]:
        """Return the requests that were found."""
        found, self._found = self._found, []
        self._reported.update(choice.seq for choice in found)
        return found

    def forget(self) -> None:
        """Report all of them again."""
        self._reported.clear()


# A prompt under way is reported again with so many more tokens at least, and with this part of it.
AHEAD_TOKENS, AHEAD_PARTS = 512, 16


class StoredPrompts:
    """Find prompts under way whose first pages other replicas can load before the last ones."""

    def __init__(self) -> None:
        self._num_pages: dict[int, int] = {}  # by request: those that are stored
        self._reported: dict[int, int] = {}  # by request: tokens
        self._found: dict[int, StoredPrompt] = {}

    def find(self, requests: Iterable[Request], offload: KVOffload, page_size: int) -> bool:
        """Look for prompts of which more can be loaded. Return whether there are any.

        Args:
            requests: those that have pages.
            offload: the tiers beyond the pool.
            page_size: tokens of a page.
        """
        self._found, num_pages, reported = {}, dict[int, int](), dict[int, int]()
        for request in requests:
            seq = request.seq
            if request.first_token_at:
                continue
            num_stored = offload.num_stored(request, self._num_pages.get(seq, 0))
            num_pages[seq], reported[seq] = num_stored, self._reported.get(seq, 0)
            num_tokens = num_stored * page_size
            num_more = max(AHEAD_TOKENS, request.num_prompt // AHEAD_PARTS)
            if num_tokens - reported[seq] >= num_more:
                self._found[seq] = StoredPrompt(
                    request.client, request.request_id, request.index, num_tokens
                )
        self._num_pages, self._reported = num_pages, reported
        return bool(self._found)

    def take(self) -> list[StoredPrompt]:
        """Return the prompts that were found."""
        found, self._found = self._found, {}
        self._reported.update((seq, prompt.num_tokens) for seq, prompt in found.items())
        return list(found.values())


class ReplicaReport:
    """Gather what the frontend has to know beside the texts.

    Every report restates which requests are open here and which ends can be replayed, after a
    restart of the frontend or of the detokenizer. Where requests can move to another replica, each
    step has a report, too, so that the frontend knows their tokens and the pages of the pool.

    Args:
        notes_steps: requests can move.
        hands_over: requests whose prompts are computed shall move.

    Attributes:
        restates: the next report does not build on earlier ones.
        frontend: as in ReplicaNews.
    """

    def __init__(self, notes_steps: bool = False, hands_over: bool = False) -> None:
        self._notes_steps = notes_steps
        self._movable = MovableRequests() if hands_over else None
        self._stored = StoredPrompts()
        self._changes: PageChanges | None = None
        self.restates = notes_steps
        self.frontend = 0

    def watch(self, kv: KVCache) -> None:
        """Report the pages of a new, empty pool from now on."""
        if self._notes_steps:
            self._changes = PageChanges(kv.page_size)
            kv.tree.observers.append(self._changes)
            self.restates = True

    def restate(self) -> None:
        """Report everything, for a frontend or detokenizer that knows nothing."""
        if self._changes is not None:
            self._changes.restate()
        self.restates = True

    def is_due(self, running: RunningBatch, offload: KVOffload, page_size: int) -> bool:
        """Return whether there is something to report, also without output of a step.

        Args:
            running: the requests that run.
            offload: the tiers beyond the pool.
            page_size: tokens of a page.
        """
        if self._movable is None:
            return self.restates
        has_movable = self._movable.find(running, offload)
        prompts = chain(running.partial.values(), running)
        has_stored = self._stored.find(prompts, offload, page_size)
        return self.restates or has_movable or has_stored

    def take(
        self,
        kv: KVCache,
        live: Iterable[Request],
        ended: Iterable[EndedRequest],
        work: PromptWork = PromptWork(),  # noqa: B008
    ) -> ReplicaNews | None:
        """Return the report, and begin a new one. None where there is nothing to report.

        Args:
            kv: the pool.
            live: all open requests.
            ended: the ended requests that can be replayed.
            work: with prompts.
        """
        restates, self.restates = self.restates, False
        if not (restates or self._notes_steps):
            return None
        added, evicted = (b"", b"") if self._changes is None else self._changes.take()
        hands_over = self._movable is not None
        movable = [] if self._movable is None else self._movable.take()
        stored = self._stored.take() if hands_over else []
        if not restates:
            return ReplicaNews(
                added, evicted, kv.num_available, movable=movable, work=work,
                hands_over=hands_over, stored=stored,
            )  # fmt: skip
        if self._movable is not None:
            self._movable.forget()
        held = [_held(request) for request in live]
        return ReplicaNews(
            added, b"", kv.num_available, True, held, list(ended), self.frontend,
            hands_over=hands_over,
        )  # fmt: skip


def _movable(request: Request) -> MovableChoice:
    return MovableChoice(
        request.seq,
        request.admitted_at,
        request.cached_tokens,
        list(request.logprobs),
        list(request.prompt_logprobs),
        [] if request.trace is None else list(request.trace.spans),
    )


def _held(request: Request) -> HeldChoice:
    return HeldChoice(
        request.seq,
        request.client,
        request.request_id,
        request.index,
        pack_ids(request.published),
        request.first_token_at,
        request.placement,
    )
