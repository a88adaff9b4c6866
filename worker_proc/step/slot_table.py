"""The size of the KV pool, and what the worker keeps of each slot."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from quadriga.config.worker_args import WorkerArgs
from quadriga.errors import ConfigError
from quadriga.wire.messages.worker import NewSlot
from worker_proc.attention.base import AttentionShape, Ints
from worker_proc.sampling.slot_sampling import SamplingState
from worker_proc.system.devices import free_memory
from worker_proc.system.transfer import TokenIds, send, send_all

CUDA_FRACTION, OTHER_FRACTION = 0.8, 0.2
"""Share of the free memory for the KV pool where --mem-fraction-static does not say."""


def pages_of_pool(
    args: WorkerArgs,
    shape: AttentionShape,
    dtype: torch.dtype,
    device: torch.device,
    most_tokens: int,
    set_aside: int = 0,
) -> int:
    """How many pages the pool gets: at most `most_tokens`, the tokens that all slots together may
    have. set_aside: bytes of the free memory that steps need. ConfigError where there is not room
    for one page."""
    page_bytes = shape.bytes_per_token(dtype) * args.page_size
    if args.max_total_tokens is not None:
        return args.max_total_tokens // args.page_size
    fraction = args.mem_fraction_static
    if fraction is None:
        fraction = CUDA_FRACTION if device.type == "cuda" else OTHER_FRACTION
    free = free_memory(device)
    share = int((free - set_aside) * fraction)
    pages = min(share // page_bytes, -(-most_tokens // args.page_size))
    if pages < 1:
        for_steps = f" less {set_aside / 2**20:.0f} MiB for a step" if set_aside else ""
        raise ConfigError(
            f"mem_fraction_static is {fraction}: of {free / 2**20:.0f} MiB free memory{for_steps}"
            f" that does not hold one page of {page_bytes / 2**20:.1f} MiB; raise it, or lower"
            " --page-size" + (" or --chunked-prefill-size" if set_aside else "")
        )
    return pages


class SlotTable:
    """Tokens, pages, progress and sampling parameters of every slot.

    On the device: tokens [slots, context + 1] int32, everything known of a slot, to which a step
    adds what it sampled, so that the next step needs nobody's answer; pages [slots, max_pages]
    int64, filled up with the spare page.
    On the host, in numpy [slots]: known and computed (tokens; nothing is known of a slot that is
    not held), num_pages_of (the pages of its row); jumps: its grammar has forced tokens, so that a
    row computes all that is known. held: the slots that are. pages_reached: every page that a slot
    ever had is below this number.
    """

    def __init__(
        self,
        num_slots: int,
        context_length: int,
        num_pages: int,
        page_size: int,
        device: torch.device,
    ) -> None:
        self.num_slots = num_slots
        self.context_length = context_length
        self.num_pages = num_pages
        self.page_size = page_size
        self.device = device
        max_pages = -(-context_length // page_size)
        self.tokens = torch.zeros(num_slots, context_length + 1, dtype=torch.int32, device=device)
        self._tokens_here = self.tokens.numpy() if device.type == "cpu" else None
        self.pages = torch.full((num_slots, max_pages), num_pages, device=device)
        self.sampling = SamplingState(num_slots, device)
        self.known = np.zeros(num_slots, dtype=np.int64)
        self.computed = np.zeros(num_slots, dtype=np.int64)
        self.num_pages_of = np.zeros(num_slots, dtype=np.int64)
        self.held: set[int] = set()
        self.pages_reached = 0
        self.jumps = np.zeros(num_slots, dtype=np.bool_)

    def release(self, slots: list[int]) -> None:
        """Forget these slots. ValueError where one is not held."""
        self.require_held(slots, "releases")
        self.held.difference_update(slots)
        self.known[slots] = 0
        self.sampling.release(slots)

    def release_all(self) -> None:
        """Forget every slot."""
        self.release(list(self.held))

    def admit(self, new: Sequence[NewSlot]) -> None:
        """Take in requests. ValueError where the plan does not fit what is kept here."""
        if not new:
            return
        token_ids = [np.frombuffer(one.token_ids, dtype="<i4") for one in new]
        pages = [np.frombuffer(one.pages, dtype="<i4") for one in new]
        for one, ids, own_pages in zip(new, token_ids, pages, strict=True):
            self._check(one, len(ids), own_pages)
            self.held.add(one.slot)
            self.jumps[one.slot] = False
            self.known[one.slot] = len(ids)
            self.computed[one.slot] = one.computed
            self.num_pages_of[one.slot] = len(own_pages)
        slots = np.array([one.slot for one in new], dtype=np.int64)
        self._scatter(self.tokens, slots, token_ids)
        self.pages[self.to_device(slots)] = self.num_pages
        self._scatter(self.pages, slots, pages)
        self.sampling.admit(new)

    def grow(self, slots: Ints, pages: Ints) -> None:
        """Append pages[i] to the page table of slots[i], in order; a slot may come more than once.
        ValueError for a slot not held, a page that does not exist, a page table that is full."""
        self.require_held(slots.tolist(), "grows")
        self._check_pages(pages, f"grown slots {slots.tolist()}")
        order = np.argsort(slots, kind="stable")
        slots, pages = slots[order], pages[order]
        first_of_slot = np.searchsorted(slots, slots)
        columns = self.num_pages_of[slots] + np.arange(len(slots)) - first_of_slot
        max_pages = self.pages.shape[1]
        if columns.max() >= max_pages:
            full = np.unique(slots[columns >= max_pages]).tolist()
            raise ValueError(f"the plan grows slots {full} beyond {max_pages} pages, the context")
        slots_there, columns_there, pages_there = send_all(self.device, slots, columns, pages)
        self.pages[slots_there, columns_there] = pages_there
        self.num_pages_of += np.bincount(slots, minlength=self.num_slots)

    def tokens_at(self, slots: Ints, positions: Ints) -> Tensor:
        """[n] int32, on the device."""
        if self._tokens_here is not None:  # numpy takes a fraction of torch's time for a few
            return torch.from_numpy(self._tokens_here[slots, positions])
        slots_there, positions_there = send_all(self.device, slots, positions)
        return self.tokens[slots_there, positions_there]

    def learn(self, slots: Ints, positions: Ints, token_ids: TokenIds) -> None:
        """The next token of each of these slots: [n]. positions: theirs, which is what is known of
        each."""
        if self._tokens_here is not None:
            self._tokens_here[slots, positions] = np.asarray(token_ids)
        else:
            slots_there, positions_there = send_all(self.device, slots, positions)
            chosen = torch.as_tensor(token_ids, dtype=self.tokens.dtype)
            self.tokens[slots_there, positions_there] = chosen
        self.known[slots] = positions + 1

    def jump(self, slot: int, token_ids: list[int]) -> None:
        """Tokens that follow what is known of a slot, whatever the model says."""
        begin = int(self.known[slot])
        end = begin + len(token_ids)
        self.tokens[slot, begin:end] = torch.tensor(token_ids, dtype=torch.int32)
        self.known[slot] = end
        self.jumps[slot] = True

    def require_held(self, slots: list[int], verb: str) -> None:
        """ValueError where one is not held; `verb` says what the plan does to them."""
        if not self.held.issuperset(slots):
            raise ValueError(f"the plan {verb} slots {slots}, not all of them held")

    def to_device(self, values: Ints) -> Tensor:
        return send(values, self.device) if self._tokens_here is None else torch.from_numpy(values)

    def _check(self, one: NewSlot, known: int, pages: Ints) -> None:
        if not 0 <= one.slot < self.num_slots or one.slot in self.held:
            raise ValueError(f"the plan admits to slot {one.slot}, which is held or does not exist")
        if not 0 <= one.computed < known <= self.context_length:
            raise ValueError(
                f"slot {one.slot}: {one.computed} tokens computed of {known} known,"
                f" the context is {self.context_length}"
            )
        if len(pages) > self.pages.shape[1] or len(pages) * self.page_size < known:
            raise ValueError(f"slot {one.slot}: {len(pages)} pages for {known} tokens")
        self._check_pages(pages, f"slot {one.slot}")

    def _check_pages(self, pages: Ints, whose: str) -> None:
        highest = int(pages.max())
        if pages.min() < 0 or highest >= self.num_pages:
            raise ValueError(f"{whose}: pages {pages.tolist()} must be 0 to {self.num_pages - 1}")
        self.pages_reached = max(self.pages_reached, highest + 1)

    def _scatter(self, table: Tensor, slots: Ints, rows: list[Ints]) -> None:
        """Write rows of different length to the beginnings of these rows of a table."""
        lengths = np.array([len(row) for row in rows])
        columns = np.concatenate([np.arange(length) for length in lengths])
        values = np.concatenate(rows).astype(np.int64)
        slots_there, columns_there, there = send_all(
            self.device, np.repeat(slots, lengths), columns, values
        )
        table[slots_there, columns_there] = there.to(table.dtype)
