"""Copies pages between the pool and the tiers, in a thread beside the steps.

A step waits for the thread only while it copies the very page that the step is about to overwrite.
Pages that wait to be stored and are overwritten before it is their turn are not stored, nor are
pages with a number that is NaN or infinite.
"""

import os
import sys
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from quadriga.server.prefix_blocks import PAGE_HASH_BYTES, split_hashes
from quadriga.wire.worker import LoadPages, PagesLoaded, StepPlan, StoredPages, StorePages
from worker_proc.kv_tiers.tiers import PoolPages, Tier
from worker_proc.step.slot_table import ints_of

NICENESS = 10
MAX_UNREPORTED = 64  # pages
CLOSE_TIMEOUT_S = 3.0

Report = StoredPages | PagesLoaded


class PageMover:
    """Stores and loads pages. Every method is for the thread that runs the steps."""

    def __init__(
        self,
        pages: PoolPages,
        page_size: int,
        tiers: Sequence[Tier],
        make_sender: Callable[[], Callable[[Report], object]],
        on_error: Callable[[], object],
    ) -> None:
        """Start the thread.

        Args:
            pages: the pool.
            page_size: tokens of a page.
            tiers: the fastest one first.
            make_sender: called in the thread: makes what sends its reports to the scheduler.
            on_error: called in the thread where it cannot go on, while the exception is handled.
        """
        self._pages = pages
        self._page_size = page_size
        self._tiers = tiers
        self._make_sender = make_sender
        self._on_error = on_error
        self._session = 0
        self._staging = np.empty(pages.page_bytes, dtype=np.uint8)
        # All of these are guarded by the condition.
        self._changed = threading.Condition()
        self._stores: OrderedDict[int, bytes] = OrderedDict()  # names by page
        self._loads: deque[LoadPages] = deque()
        self._unreported: dict[bytes, None] = {}  # names of pages that were gained or lost
        self._copying = -1  # page
        self._is_busy = False
        self._is_beginning = False  # a session
        self._num_reported = 0  # damaged pages; of the thread
        threading.Thread(target=self._run, name="kv offload", daemon=True).start()

    # --- messages of the scheduler ----------------------------------------------------------------

    def begin_session(self, session: int) -> bytes:
        """Drop what is under way for an earlier scheduler.

        Returns:
            The names of all pages that can be loaded.
        """
        with self._changed:
            self._stores.clear()
            self._loads.clear()
            self._session, self._is_beginning = session, True
            self._changed.wait_for(lambda: not self._is_busy)
            self._is_beginning = False
            self._unreported.clear()
            return b"".join(dict.fromkeys(name for tier in self._tiers for name in tier.names()))

    def store(self, message: StorePages) -> None:
        """Store pages that earlier steps have computed."""
        pages = ints_of(message.pages).tolist()
        with self._changed:
            self._overwrite(pages)
            names = split_hashes(message.hashes, PAGE_HASH_BYTES)
            self._stores.update(zip(pages, names, strict=True))
            self._changed.notify_all()

    def load(self, message: LoadPages) -> None:
        """Load pages to places in the pool that no step uses."""
        with self._changed:
            self._overwrite(ints_of(message.pages).tolist())
            self._loads.append(message)
            self._changed.notify_all()

    def before_step(self, plan: StepPlan) -> None:
        """Give up the stores of pages that a step is about to overwrite."""
        with self._changed:
            if not self._stores and self._copying < 0:
                return
            self._overwrite(ints_of(plan.grown)[1::2].tolist())
            for new in plan.new:
                first_written = new.computed // self._page_size
                self._overwrite(ints_of(new.pages)[first_written:].tolist())

    def _overwrite(self, pages: Iterable[int]) -> None:
        for page in pages:
            name = self._stores.pop(page, None)
            if name is not None:
                self._unreported[name] = None
            if page == self._copying:
                self._changed.wait_for(lambda page=page: self._copying != page)  # type: ignore[misc]

    def close(self) -> None:
        """Wait until all pages are stored, or a few seconds have passed."""
        with self._changed:
            self._changed.wait_for(lambda: not self._stores and not self._is_busy, CLOSE_TIMEOUT_S)

    # --- the thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        if sys.platform == "linux":
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        try:
            send = self._make_sender()
            while True:
                self._move(send)
        except BaseException:  # requests would wait for their pages for ever
            self._on_error()
            raise

    def _move(self, send: Callable[[Report], object]) -> None:
        """Wait for something to do, do it, and report it."""
        load, page, name = self._next()
        if load is not None:
            self._load(load, send)
        else:
            self._store(page, name)
        with self._changed:
            self._is_busy = False
            is_due = not self._stores or len(self._unreported) >= MAX_UNREPORTED
            report = self._report() if is_due and not self._is_beginning else None
            self._changed.notify_all()
        if report is not None:
            send(report)

    def _next(self) -> tuple[LoadPages | None, int, bytes]:
        """Return the next load, or the next page with its name to store."""
        with self._changed:
            self._changed.wait_for(lambda: self._loads or self._stores)
            self._is_busy = True
            if self._loads:
                return self._loads.popleft(), -1, b""
            self._copying, name = self._stores.popitem(last=False)
            return None, self._copying, name

    def _store(self, page: int, name: bytes) -> None:
        is_finite = self._pages.is_finite(page)
        if is_finite:
            self._pages.copy_out(page, self._staging)
        with self._changed:
            self._copying = -1
            self._changed.notify_all()
        lost: list[bytes] = []
        for tier in self._tiers if is_finite else ():
            lost += tier.write(name, self._staging)
        with self._changed:
            self._unreported.update((each, None) for each in lost if not self._has(each))
            self._unreported[name] = None

    def _load(self, message: LoadPages, send: Callable[[Report], object]) -> None:
        began, session, num_loaded = time.monotonic(), self._session, 0
        pages = ints_of(message.pages).tolist()
        names = split_hashes(message.hashes, PAGE_HASH_BYTES)
        for page, name in zip(pages, names, strict=True):
            if session != self._session:
                return
            buffers = self._pages.buffers(page)
            if not any(tier.read(name, buffers) for tier in self._tiers):
                with self._changed:
                    self._unreported[name] = None
                break
            if not self._pages.is_finite(page):
                break
            num_loaded += 1
        send(PagesLoaded(message.load, num_loaded, session, time.monotonic() - began))

    def _has(self, name: bytes) -> bool:
        return any(name in tier for tier in self._tiers)

    def _report(self) -> StoredPages | None:
        """Return what has changed since the last report, with the condition held."""
        if not self._unreported:
            return None
        names, self._unreported = self._unreported, {}
        num_damaged = sum(tier.num_damaged for tier in self._tiers)
        report = StoredPages(
            b"".join(name for name in names if self._has(name)),
            b"".join(name for name in names if not self._has(name)),
            self._session,
            num_damaged - self._num_reported,
            any(tier.has_failed for tier in self._tiers),
        )
        self._num_reported = num_damaged
        return report
