"""Copies pages between the pool and the tiers, in a thread beside the steps.

A page is stored when the step that computes it has ended. A step waits only for a copy of the very
page that it is about to overwrite: on a GPU the device waits, and the host goes on. Pages that wait
to be stored and are overwritten before it is their turn are not stored, nor are pages with a number
that is NaN or infinite. A load is reported when its pages are in the pool, so that the scheduler
plans other rows meanwhile, and no step waits for them.
"""

import os
import sys
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from quadriga.server.prefix_blocks import PAGE_HASH_BYTES, split_hashes
from quadriga.wire.worker import LoadPages, PagesLoaded, StepPlan, StoredPages, StorePages
from worker_proc.kv_tiers.page_copies import Bytes, PagePlace
from worker_proc.kv_tiers.pool_pages import PageCopy, PoolPages
from worker_proc.kv_tiers.tiers import MemoryPages, PageFiles, PeerTier
from worker_proc.step.slot_table import ints_of

NICENESS = 10
MAX_UNREPORTED = 64  # pages
CLOSE_TIMEOUT_S = 3.0
MAX_LOADING = 2  # copies of one load in flight: the next batch is read from disk meanwhile

Report = StoredPages | PagesLoaded


class _WaitingStore(NamedTuple):
    """A page to store under a name, when so many steps have ended."""

    name: bytes
    num_steps: int


class _WaitingLoad(NamedTuple):
    """A load that waits for its turn, and when it was asked for (time.monotonic)."""

    message: LoadPages
    asked_at: float


@dataclass(frozen=True, slots=True)
class _Loading:
    """A batch of pages that is copied to the pool, and the buffers that it is copied from."""

    copy: PageCopy
    buffers: list[Bytes]


@dataclass(slots=True)
class _Batch:
    """What was found of a batch of pages to load, up to the first one that is missing."""

    pages: list[int] = field(default_factory=list)
    sources: list[Bytes | None] = field(default_factory=list)
    buffers: list[Bytes] = field(default_factory=list)
    missing: bytes | None = None


def num_spare_of(pages: PoolPages) -> int:
    """Return how many buffers are in use at most for pages that no tier keeps."""
    return MAX_LOADING * pages.max_batch


class PageMover:
    """Stores and loads pages. Its methods are for the thread that runs the steps.

    Only `after_step` is for any thread.
    """

    def __init__(
        self,
        pages: PoolPages,
        page_size: int,
        memory: MemoryPages | None,
        files: PageFiles | None,
        make_sender: Callable[[], Callable[[Report], object]],
        on_error: Callable[[], object],
        peers: PeerTier | None = None,
        niceness: int = NICENESS,
    ) -> None:
        """Start the thread.

        Args:
            pages: the pool.
            page_size: tokens of a page.
            memory: the tier in memory, which is looked at first.
            files: the tier on disk.
            make_sender: called in the thread: makes what sends its reports to the scheduler.
            on_error: called in the thread where it cannot go on, while the exception is handled.
            peers: the tiers of other replicas, where pages are looked for that no own tier has.
            niceness: of the thread; 0 where streams wait for it.
        """
        self._pages = pages
        self._page_size = page_size
        self._memory, self._files, self._peers = memory, files, peers
        self._make_sender = make_sender
        self._on_error = on_error
        self._niceness = niceness
        self._session = 0
        num_kept = 0 if memory is None else memory.max_pages
        pages.reserve(num_kept + num_spare_of(pages))
        # All of these are guarded by the condition.
        self._changed = threading.Condition()
        self._num_launched = self._num_ended = 0  # steps
        self._stores: OrderedDict[int, _WaitingStore] = OrderedDict()  # by page
        self._loads: deque[_WaitingLoad] = deque()  # those that requests wait for
        self._loads_ahead: deque[_WaitingLoad] = deque()
        self._unreported: dict[bytes, None] = {}  # names of pages that were gained or lost
        self._launching: set[int] = set()  # pages whose copy to a tier is being launched
        self._leaving: dict[int, PageCopy] = {}  # copies to a tier that were launched, by page
        self._is_busy = False
        self._is_beginning = False  # a session
        self._num_reported = 0  # damaged pages; of the thread
        threading.Thread(target=self._run, name="kv offload", daemon=True).start()

    # --- messages of the scheduler, and steps -----------------------------------------------------

    @property
    def page_bytes(self) -> int:
        """Size of a page."""
        return self._pages.page_bytes

    @property
    def fetches(self) -> bool:
        """Whether pages can be loaded from the tiers of other replicas."""
        return self._peers is not None

    def begin_session(self, session: int) -> bytes | None:
        """Drop what is under way for an earlier scheduler, whose steps have to end first.

        Returns:
            The names of all pages that can be loaded from the own tiers; None: there are none.
        """
        with self._changed:
            self._stores.clear()
            self._loads.clear()
            self._loads_ahead.clear()
            self._session, self._is_beginning = session, True
            self._changed.wait_for(
                lambda: not self._is_busy and self._num_ended == self._num_launched
            )
            self._is_beginning = False
            self._unreported.clear()
            tiers = [tier for tier in (self._memory, self._files) if tier is not None]
            if not tiers:
                return None
            return b"".join(dict.fromkeys(name for tier in tiers for name in tier.names()))

    def store(self, message: StorePages) -> None:
        """Store pages that the steps launched before compute."""
        pages = ints_of(message.pages).tolist()
        with self._changed:
            self._give_up_stores(pages)
            names = split_hashes(message.hashes, PAGE_HASH_BYTES)
            for page, name in zip(pages, names, strict=True):
                self._stores[page] = _WaitingStore(name, self._num_launched)
            self._changed.notify_all()

    def load(self, message: LoadPages) -> None:
        """Load pages to places in the pool that no step uses."""
        with self._changed:
            self._give_up_stores(ints_of(message.pages).tolist())
            loads = self._loads_ahead if message.is_ahead else self._loads
            loads.append(_WaitingLoad(message, time.monotonic()))
            self._changed.notify_all()

    def before_step(self, plan: StepPlan) -> None:
        """Give up the stores of pages that a step, which is launched next, is to overwrite."""
        with self._changed:
            self._num_launched += 1
            if not self._stores and not self._launching and not self._leaving:
                return
            self._before_overwriting(ints_of(plan.grown)[1::2].tolist())
            for new in plan.new:
                first_written = new.computed // self._page_size
                self._before_overwriting(ints_of(new.pages)[first_written:].tolist())

    def after_step(self) -> None:
        """Note that the next of the steps that were launched has ended."""
        with self._changed:
            self._num_ended += 1
            if self._stores or self._is_beginning:
                self._changed.notify_all()

    def _before_overwriting(self, pages: Sequence[int]) -> None:
        self._give_up_stores(pages)
        for page in pages:
            if page in self._launching:
                self._changed.wait_for(lambda page=page: page not in self._launching)  # type: ignore[misc]
            if (copy := self._leaving.get(page)) is not None:
                copy.hold_steps()

    def _give_up_stores(self, pages: Iterable[int]) -> None:
        for page in pages:
            store = self._stores.pop(page, None)
            if store is not None:
                self._unreported[store.name] = None

    def close(self) -> None:
        """Wait until all pages are stored, or a few seconds have passed."""
        with self._changed:
            self._changed.wait_for(lambda: not self._stores and not self._is_busy, CLOSE_TIMEOUT_S)

    # --- the thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        if sys.platform == "linux" and self._niceness:
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), self._niceness)
        try:
            send = self._make_sender()
            while True:
                self._move(send)
        except BaseException:  # requests would wait for their pages for ever
            self._on_error()
            raise

    def _move(self, send: Callable[[Report], object]) -> None:
        """Wait for something to do, do it, and report it."""
        load, stores = self._next()
        if load is not None:
            self._load(load, send)
        else:
            self._store(stores)
        with self._changed:
            self._is_busy = False
            is_due = not self._stores or len(self._unreported) >= MAX_UNREPORTED
            report = self._report() if is_due and not self._is_beginning else None
            self._changed.notify_all()
        if report is not None:
            send(report)

    def _next(self) -> tuple[_WaitingLoad | None, dict[int, bytes]]:
        """Return the next load, or a batch of pages to store with their names."""
        with self._changed:
            self._changed.wait_for(lambda: self._loads or self._loads_ahead or self._is_store_due())
            self._is_busy = True
            if loads := self._loads or self._loads_ahead:
                return loads.popleft(), {}
            batch: dict[int, bytes] = {}
            while self._is_store_due() and len(batch) < self._pages.max_batch:
                page, store = self._stores.popitem(last=False)
                batch[page] = store.name
            self._launching.update(batch)
            return None, batch

    def _is_store_due(self) -> bool:
        if not self._stores:
            return False
        return next(iter(self._stores.values())).num_steps <= self._num_ended

    def _store(self, names: dict[int, bytes]) -> None:
        pages = list(names)
        buffers = [self._pages.take_buffer() for _ in pages]
        copy = self._pages.begin_copy_out(pages, buffers)
        with self._changed:
            self._launching.clear()
            self._leaving = dict.fromkeys(pages, copy)
            self._changed.notify_all()
        finite = copy.wait()
        with self._changed:
            self._leaving = {}
        lost: list[bytes] = []
        checksums: Sequence[bytes | None] = copy.checksums or [None] * len(pages)
        for name, buffer, is_finite, checksum in zip(
            names.values(), buffers, finite, checksums, strict=True
        ):
            if is_finite:
                lost += self._keep(name, buffer, checksum)
            else:
                self._pages.give_back([buffer])
        with self._changed:
            self._unreported.update((each, None) for each in lost if not self._has(each))
            self._unreported.update((name, None) for name in names.values())

    def _keep(self, name: bytes, buffer: Bytes, checksum: bytes | None) -> list[bytes]:
        """Give a page to the tiers. Return the names of those that made room for it."""
        lost = [] if self._files is None else self._files.write(name, buffer)
        freed = [buffer]
        if self._memory is not None:
            removed, freed = self._memory.keep(name, buffer, checksum)
            lost += removed
        self._pages.give_back(freed)
        return lost

    def _load(self, load: _WaitingLoad, send: Callable[[Report], object]) -> None:
        message, session, began = load.message, self._session, time.monotonic()

        def is_wanted() -> bool:
            return session == self._session and not (message.is_ahead and self._loads)

        num_read, num_damaged = self._counts_of_peers()
        if self._peers is not None:
            names = split_hashes(message.hashes, PAGE_HASH_BYTES)
            missing = [name for name in names if not self._has(name)]
            self._peers.begin(missing, is_wanted, load.asked_at)
        under_way: deque[_Loading] = deque()
        finite: list[bool] = []
        for batch in self._find(message):
            if batch.pages:
                copy = self._pages.begin_copy_in(batch.pages, batch.sources)
                under_way.append(_Loading(copy, batch.buffers))
            else:
                self._pages.give_back(batch.buffers)
            if batch.missing is not None:
                with self._changed:
                    self._unreported[batch.missing] = None
            if len(under_way) == MAX_LOADING:
                finite += self._end(under_way.popleft())
            if not is_wanted():
                break
        while under_way:
            finite += self._end(under_way.popleft())
        if session == self._session:
            num_loaded = [*finite, False].index(False)
            seconds, counts = time.monotonic() - began, self._counts_of_peers()
            num_fetched, num_found_damaged = counts[0] - num_read, counts[1] - num_damaged
            send(
                PagesLoaded(
                    message.load, num_loaded, session, seconds, num_fetched, num_found_damaged
                )
            )

    def _counts_of_peers(self) -> tuple[int, int]:
        """Return how many pages were read from other replicas, and how many were damaged there."""
        return (0, 0) if self._peers is None else (self._peers.num_read, self._peers.num_damaged)

    def _end(self, loading: _Loading) -> list[bool]:
        """Wait for a batch to be in the pool, and take its buffers back."""
        finite = loading.copy.wait()
        self._pages.give_back(loading.buffers)
        return finite

    def _find(self, message: LoadPages) -> Iterator[_Batch]:
        """Yield the pages of a load in batches, up to the first one that is missing."""
        pages = ints_of(message.pages).tolist()
        names = split_hashes(message.hashes, PAGE_HASH_BYTES)
        batch = _Batch()
        for page, name in zip(pages, names, strict=True):
            if not self._take_page(page, name, batch):
                batch.missing = name
                break
            if len(batch.pages) == self._pages.max_batch:
                yield batch
                batch = _Batch()
        yield batch

    def _take_page(self, page: int, name: bytes, batch: _Batch) -> bool:
        """Add a page of a tier to a batch; return False if it is not there."""
        source = None if self._memory is None else self._memory.get(name)
        if source is None:
            is_in_file = self._files is not None and name in self._files
            if not is_in_file and self._peers is None:
                return False
            place = self._pages.place_of(page)
            if place is None:
                source = self._pages.take_buffer()
                batch.buffers.append(source)
                place = PagePlace.at(source)
            if not self._read(name, place):
                return False
        batch.pages.append(page)
        batch.sources.append(source)
        return True

    def _read(self, name: bytes, place: PagePlace) -> bool:
        """Read a page from the own disk or from another replica; return False if it has none."""
        if self._files is not None and self._files.read(name, place.buffers):
            return True
        return self._peers is not None and self._peers.read(name, place)

    def _has(self, name: bytes) -> bool:
        tiers = (self._memory, self._files)
        return any(tier is not None and name in tier for tier in tiers)

    def _num_damaged(self) -> int:
        """Return how many pages of the own tiers were found damaged."""
        in_memory = 0 if self._memory is None else self._memory.num_damaged
        return in_memory + (0 if self._files is None else self._files.num_damaged)

    def _report(self) -> StoredPages | None:
        """Return what has changed since the last report, with the condition held."""
        if not self._unreported:
            return None
        names, self._unreported = self._unreported, {}
        num_damaged = self._num_damaged()
        report = StoredPages(
            b"".join(name for name in names if self._has(name)),
            b"".join(name for name in names if not self._has(name)),
            self._session,
            num_damaged - self._num_reported,
            self._files is not None and self._files.has_failed,
        )
        self._num_reported = num_damaged
        return report
