"""A simulated worker with a tier of pages beyond the pool, which moves them at random times."""

import random
from collections import deque

import msgspec

from quadriga.server.prefix_blocks import PAGE_HASH_BYTES, split_hashes
from quadriga.wire.packing import unpack_ids
from quadriga.wire.worker import (
    LoadPages,
    PagesLoaded,
    StepPlan,
    StepResult,
    StoredPages,
    StorePages,
)
from tests.unit.simulation import SimulatedWorker, World

LOSS_RATE = 0.1  # of pages that are to be loaded, and of a tier when the worker crashes


class TieredWorker(SimulatedWorker):
    """Stores pages unless they are overwritten first, and loads them; now and then one is lost.

    Attributes:
        tier: what each page holds, by its name.
        num_loaded: Pages that were loaded.
    """

    def __init__(self, page_size: int, window: int = 0) -> None:
        super().__init__(page_size, window)
        self.tier: dict[bytes, list[int]] = {}
        self.num_loaded = 0
        self.source = random.Random(7)
        self._stores: dict[int, bytes] = {}
        self._loads: deque[LoadPages] = deque()
        self._unordered: deque[tuple[int, StorePages | LoadPages]] = deque()
        self._num_sent = self._num_run = 0

    def stored_names(self) -> bytes:
        return b"".join(self.tier)

    def send(self, message: msgspec.Struct) -> None:
        if isinstance(message, StorePages | LoadPages):
            self._unordered.append((self._num_sent, message))
            return
        self._num_sent += isinstance(message, StepPlan)
        super().send(message)

    def run_one(self) -> StepResult | None:
        if self.plans:
            self._receive()
            plan = self.plans[0][1]
            overwritten = unpack_ids(plan.grown).tolist()[1::2]
            for new in plan.new:
                overwritten += unpack_ids(new.pages).tolist()[new.computed // self.page_size :]
            self._give_up(overwritten)
            self._num_run += 1
        return super().run_one()

    def restart(self) -> None:
        super().restart()
        self._stores.clear()
        self._loads.clear()
        self._num_run = self._num_sent
        self.tier = {n: p for n, p in self.tier.items() if self.source.random() > LOSS_RATE}

    def transfer(self) -> PagesLoaded | StoredPages | None:
        """Move pages; None if there are none to move."""
        self._receive()
        if self._loads and (not self._stores or self.source.random() < 0.5):
            return self._load(self._loads.popleft())
        if not self._stores:
            return None
        page = next(iter(self._stores))
        name = self._stores.pop(page)
        held = [self.kv.get((page, offset), -2) for offset in range(self.page_size)]
        assert self.tier.setdefault(name, held) == held, "one name for two contents"
        return StoredPages(name, self._lost(), self.session)

    def _receive(self) -> None:
        """Take in the messages that came after plans which were run."""
        while self._unordered and self._unordered[0][0] <= self._num_run:
            _sent_after, message = self._unordered.popleft()
            if message.session != self.session:  # it was on its way as the worker crashed
                continue
            pages = unpack_ids(message.pages).tolist()
            self._give_up(pages)
            if isinstance(message, StorePages):
                names = split_hashes(message.hashes, PAGE_HASH_BYTES)
                self._stores.update(zip(pages, names, strict=True))
            else:
                self._loads.append(message)

    def _give_up(self, pages: list[int]) -> None:
        for page in pages:
            self._stores.pop(page, None)

    def _load(self, load: LoadPages) -> PagesLoaded:
        num_loaded = 0
        names = split_hashes(load.hashes, PAGE_HASH_BYTES)
        for page, name in zip(unpack_ids(load.pages).tolist(), names, strict=True):
            if self.source.random() < LOSS_RATE:
                self.tier.pop(name, None)
            held = self.tier.get(name, [-3] * self.page_size)
            self.kv.update(((page, offset), state) for offset, state in enumerate(held))
            if name not in self.tier:
                break
            num_loaded += 1
        self.num_loaded += num_loaded
        return PagesLoaded(load.load, num_loaded, self.session)

    def _lost(self) -> bytes:
        """Lose a page of the tier now and then, and return its name."""
        if not self.tier or self.source.random() > LOSS_RATE:
            return b""
        name = self.source.choice(list(self.tier))
        del self.tier[name]
        return name


class TieredWorld(World):
    """A world whose worker has a tier beyond its pool."""

    worker_class = TieredWorker
    worker: TieredWorker

    def step(self) -> bool:
        if self.worker.source.random() < 0.7:
            self._transfer()
        return super().step() or self._transfer()

    def _transfer(self) -> bool:
        message = self.worker.transfer()
        if message is not None:
            self.schedule([], [message])
            self._acknowledge()
            self._check()
        return message is not None
