"""Everything that the worker keeps of each slot between steps."""

from collections.abc import Iterator, Mapping, Sequence

import msgspec
import numpy as np
import torch
from torch import Tensor

from quadriga.sampling.pooling import Pooling
from quadriga.wire.worker import NO_ADAPTER, NewSlot, StepPlan, WantedLogprobs
from worker_proc.models.attention import Ints
from worker_proc.models.transfer import DeviceToHostCopier, Fetch, TokenIds, send_all
from worker_proc.sampling.sampler import SamplingState

MAX_VOCAB_SIZE = 2**31
ALL_FINITE = ALL_FIRST = 1 << 40  # no position is as high


class SlotTable:
    """Tokens, pages, progress and sampling parameters of every slot.

    Attributes:
        tokens: `[slots, context + 1]` int32 on the device: all known tokens of a slot. A step
            appends the tokens that it samples, so that the next one need not wait for the host.
        pages: `[slots, max_pages]` int64 on the device, padded with the spare page.
        num_known, num_computed: `[slots]` on the host, in tokens; nothing is known of a slot that
            is not held.
        num_pages_of: `[slots]` on the host: pages in the slot's row.
        has_forced: `[slots]` on the host: the slot's grammar has forced tokens, so that a row
            computes all that is known of it.
        drafts: tokens that the next step of a slot computes after the known ones, by slot. The
            step reads them in `tokens`, behind those, and may write what it samples there.
        num_drafts: `[slots]` on the host: their number.
        nonfinite_from: `[slots]` int64 on the device: the lowest position with keys or values that
            are NaN or infinite since the slot was filled, or ALL_FINITE. The engine lowers it.
        poolings: of the slots whose answers are vectors.
        second_from: `[slots]` int64 on the host: the position of a slot's first token of the second
            type, or ALL_FIRST.
        adapters: `[slots]` int64 on the host: the engine's index of a slot's adapter; NO_ADAPTER:
            the model without one.
        held: the slots in use.
        refused: why the requests of slots cannot be computed, by slot: they hold ids that the model
            does not have. Their rows are computed with other tokens, and have failed.
        num_pages_used: every page that a slot ever had has a lower number.
        copier: copies what a step samples to the host.
    """

    def __init__(
        self,
        num_slots: int,
        context_length: int,
        num_pages: int,
        page_size: int,
        device: torch.device,
        vocab_size: int = MAX_VOCAB_SIZE,
    ) -> None:
        self.num_slots = num_slots
        self.vocab_size = vocab_size
        self.context_length = context_length
        self.num_pages = num_pages
        self.page_size = page_size
        self.device = device
        max_pages = -(-context_length // page_size)
        self.tokens = torch.zeros(num_slots, context_length + 1, dtype=torch.int32, device=device)
        self._host_tokens = self.tokens.numpy() if device.type == "cpu" else None
        self.pages = torch.full((num_slots, max_pages), num_pages, device=device)
        self.sampling = SamplingState(num_slots, device)
        self.num_known = np.zeros(num_slots, dtype=np.int64)
        self.num_computed = np.zeros(num_slots, dtype=np.int64)
        self.num_pages_of = np.zeros(num_slots, dtype=np.int64)
        self.has_forced = np.zeros(num_slots, dtype=np.bool_)
        self.drafts: dict[int, Sequence[int]] = {}
        self.num_drafts = np.zeros(num_slots, dtype=np.int64)
        self.nonfinite_from = torch.full((num_slots,), ALL_FINITE, device=device)
        self.poolings: dict[int, Pooling] = {}
        self.second_from = np.full(num_slots, ALL_FIRST, dtype=np.int64)
        self.adapters = np.full(num_slots, NO_ADAPTER, dtype=np.int64)
        self.held: set[int] = set()
        self.refused: dict[int, str] = {}
        self.num_pages_used = 0
        self.copier = DeviceToHostCopier(device)

    def apply(self, plan: StepPlan) -> None:
        """Release, admit and grow slots as a plan says, before its rows are computed.

        Raises:
            ValueError: the plan contradicts the slots.
        """
        if plan.released:
            self.release(ints_of(plan.released).tolist())
        if plan.new:
            self.admit(plan.new)
        if plan.grown:
            self.grow(*ints_of(plan.grown).reshape(-1, 2).T)

    def release(self, slots: list[int]) -> None:
        """Forget these slots. Raises ValueError for a slot that is not held."""
        self.require_held(slots, "releases")
        self.held.difference_update(slots)
        for slot in slots if self.refused else ():
            self.refused.pop(slot, None)
        for slot in slots if self.poolings else ():
            self.poolings.pop(slot, None)
        self.num_known[slots] = 0
        self.adapters[slots] = NO_ADAPTER
        self.sampling.release(slots)

    def release_all(self) -> None:
        """Forget every slot."""
        self.release(list(self.held))

    def admit(self, new: Sequence[NewSlot]) -> None:
        """Fill slots with requests. Raises ValueError for a request that cannot be admitted.

        A request with an id that the model does not have is refused: nothing that has such an id
        may reach a kernel, where it would read other memory.
        """
        new = [self._without_unknown_ids(slot) for slot in new]
        token_ids = [np.frombuffer(slot.token_ids, dtype="<i4") for slot in new]
        pages = [np.frombuffer(slot.pages, dtype="<i4") for slot in new]
        for slot, slot_ids, slot_pages in zip(new, token_ids, pages, strict=True):
            self._check_new(slot, len(slot_ids), slot_pages)
            self.held.add(slot.slot)
            self.has_forced[slot.slot] = False
            self.num_known[slot.slot] = len(slot_ids)
            self.num_computed[slot.slot] = slot.computed
            self.num_pages_of[slot.slot] = len(slot_pages)
            self.second_from[slot.slot] = ALL_FIRST
            self.adapters[slot.slot] = slot.adapter
            if (pooling := slot.pooling) is not None:
                self.poolings[slot.slot] = pooling
                self.second_from[slot.slot] = pooling.num_first or ALL_FIRST
        slots = np.array([slot.slot for slot in new], dtype=np.int64)
        places = (*_places(slots, token_ids), *_places(slots, pages))
        device_slots, *places_on_device = send_all(self.device, slots, *places)
        self.pages[device_slots] = self.num_pages
        self.nonfinite_from[device_slots] = ALL_FINITE
        for table, at in ((self.tokens, places_on_device[:3]), (self.pages, places_on_device[3:])):
            rows, columns, values = at
            table[rows, columns] = values.to(table.dtype)
        self.sampling.admit(new)

    def grow(self, slots: Ints, pages: Ints) -> None:
        """Append `pages[i]` to the page table of `slots[i]`, in order; slots may repeat.

        Raises:
            ValueError: a slot is not held, a page does not exist, or a page table is full.
        """
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
        device_slots, device_columns, device_pages = send_all(self.device, slots, columns, pages)
        self.pages[device_slots, device_columns] = device_pages
        self.num_pages_of += np.bincount(slots, minlength=self.num_slots)

    def adapters_of(self, slots: Ints) -> Ints | None:
        """Return the indexes `[n]` of the adapters of slots `[n]`; None: no slot has one."""
        adapters: Ints = self.adapters[slots]
        return adapters if (adapters != NO_ADAPTER).any() else None

    def tokens_at(self, slots: Ints, positions: Ints) -> Tensor:
        """Return the tokens `[n]` int32 at positions of slots, on the device."""
        if self._host_tokens is not None:  # numpy takes a fraction of torch's time for a few
            return torch.from_numpy(self._host_tokens[slots, positions])
        device_slots, device_positions = send_all(self.device, slots, positions)
        return self.tokens[device_slots, device_positions]

    def known_tokens(self, slot: int, begin: int) -> list[int]:
        """Return the known tokens of a slot from position `begin` on; the host waits for them."""
        token_ids: list[int] = self.tokens[slot, begin : int(self.num_known[slot])].tolist()
        return token_ids

    def tokens_from(self, begins: Mapping[int, int]) -> dict[int, list[int]]:
        """Return the known tokens of slots from a position of each on; the host waits once."""
        if not begins:
            return {}
        spans = [np.arange(begin, self.num_known[slot]) for slot, begin in begins.items()]
        slots, _, positions = _places(np.array(list(begins), dtype=np.int64), spans)
        token_ids = self.tokens_at(slots, positions).tolist()
        ends = np.cumsum([len(span) for span in spans]).tolist()
        return {
            slot: token_ids[end - len(span) : end]
            for slot, span, end in zip(begins, spans, ends, strict=True)
        }

    def fetch_known_tokens(self, slot: int, begin: int) -> Fetch:
        """Start to copy the known tokens of a slot, which may then be released."""
        return self.copier.begin(self.tokens[slot, begin : int(self.num_known[slot])].clone())

    def write_tokens(self, slots: Ints, positions: Ints, token_ids: TokenIds) -> None:
        """Write a token `[n]` at a position of each slot; `num_known` stays as it is.

        A 0 takes the place of one that could not be sampled.
        """
        if self._host_tokens is not None:
            self._host_tokens[slots, positions] = np.maximum(np.asarray(token_ids), 0)
            return
        on_host = [token_ids] if isinstance(token_ids, np.ndarray) else []
        device_slots, device_positions, *sent = send_all(self.device, slots, positions, *on_host)
        values = sent[0] if sent else torch.as_tensor(token_ids)
        self.tokens[device_slots, device_positions] = values.to(self.tokens.dtype).clamp_(min=0)

    def forget_nonfinite(self, slots: Ints, positions: Ints) -> None:
        """Forget that keys or values from a position of each slot on `[n]` are not finite.

        They are computed again before anything reads them.
        """
        device_slots, begins = send_all(self.device, slots, positions)
        lowest = self.nonfinite_from[device_slots]
        self.nonfinite_from[device_slots] = lowest.masked_fill_(lowest >= begins, ALL_FINITE)

    def append_forced(self, slot: int, token_ids: list[int]) -> None:
        """Append tokens that a grammar forces to what is known of a slot."""
        begin = int(self.num_known[slot])
        end = begin + len(token_ids)
        self.tokens[slot, begin:end] = torch.tensor(token_ids, dtype=torch.int32)
        self.num_known[slot] = end
        self.has_forced[slot] = True

    def room_for_drafts(self, slot: int) -> int:
        """Return how many tokens may be drafted after the known ones of a slot.

        One more has a page then, as the scheduler counts on it for a step that it has planned.
        """
        reach = int(self.num_pages_of[slot]) * self.page_size - 1
        return min(reach, self.context_length - 1) - int(self.num_known[slot])

    @property
    def has_drafts(self) -> bool:
        """Whether a slot has drafts."""
        return bool(self.drafts)

    def draft(self, drafts: Mapping[int, Sequence[int]]) -> None:
        """Let the next step compute drafts, at least one for each of these slots."""
        self.drafts.update(drafts)
        for slot, token_ids in drafts.items():
            self.num_drafts[slot] = len(token_ids)
        self.write_drafts()

    def write_drafts(self) -> None:
        """Write all drafts to `tokens`, where the step reads them."""
        rows = [np.array(token_ids, dtype=np.int64) for token_ids in self.drafts.values()]
        drafting = np.array(list(self.drafts), dtype=np.int64)
        slots, columns, token_ids = _places(drafting, rows)
        self.write_tokens(slots, self.num_known[slots] + columns, token_ids)

    def forget_drafts(self) -> None:
        """Forget the drafts of all slots, after the step that computed them."""
        self.drafts.clear()
        self.num_drafts[:] = 0

    def require_held(self, slots: list[int], verb: str) -> None:
        """Raise ValueError for a slot that is not held; `verb` says what the plan does to it."""
        if not self.held.issuperset(slots):
            raise ValueError(f"the plan {verb} slots {slots}, not all of them held")

    def _without_unknown_ids(self, new: NewSlot) -> NewSlot:
        """Return a request, or refuse it and return it with other tokens and without rules."""
        for ids in _ids_of(new):
            if len(ids) and not 0 <= ids.min() <= ids.max() < self.vocab_size:
                wrong = int(ids.max()) if ids.max() >= self.vocab_size else int(ids.min())
                self.refused[new.slot] = (
                    f"the request holds the token id {wrong}: ids of this model are 0 to"
                    f" {self.vocab_size - 1}"
                )
                others = bytes(len(new.token_ids))
                return msgspec.structs.replace(new, token_ids=others, rules=None)
        return new

    def _check_new(self, new: NewSlot, num_known: int, pages: Ints) -> None:
        if not 0 <= new.slot < self.num_slots or new.slot in self.held:
            raise ValueError(f"the plan admits to slot {new.slot}, which is held or does not exist")
        if not 0 <= new.computed < num_known <= self.context_length:
            raise ValueError(
                f"slot {new.slot}: {new.computed} tokens computed of {num_known} known,"
                f" the context is {self.context_length}"
            )
        if len(pages) > self.pages.shape[1] or len(pages) * self.page_size <= new.computed:
            raise ValueError(
                f"slot {new.slot}: {len(pages)} pages, {new.computed} of {num_known} tokens"
                " computed: there must be a page for the next one, and no more than the context has"
            )
        self._check_pages(pages, f"slot {new.slot}")

    def _check_pages(self, pages: Ints, owner: str) -> None:
        highest = int(pages.max())
        if pages.min() < 0 or highest >= self.num_pages:
            raise ValueError(f"{owner}: pages {pages.tolist()} must be 0 to {self.num_pages - 1}")
        self.num_pages_used = max(self.num_pages_used, highest + 1)


def _places(slots: Ints, rows: list[Ints]) -> tuple[Ints, Ints, Ints]:
    """Return slot, column and value of each element of the slots' rows, which begin at column 0."""
    lengths = np.array([len(row) for row in rows])
    columns = np.concatenate([np.arange(length) for length in lengths])
    return np.repeat(slots, lengths), columns, np.concatenate(rows)


def _ids_of(new: NewSlot) -> Iterator[Ints]:
    """Yield all token ids of a request and of its parameters."""
    packed, rules = [new.token_ids], new.rules
    if rules is not None:
        packed += (rules.bias_ids, rules.allowed_ids, rules.stop_ids, *rules.bad_words)
        if isinstance(rules.logprobs, WantedLogprobs):
            packed.append(rules.logprobs.token_ids)
    for ids in packed:
        yield np.frombuffer(ids, dtype="<i4")


def ints_of(packed: bytes) -> Ints:
    """Return the integers of `pack_ids` as an array."""
    return np.frombuffer(packed, dtype="<i4").astype(np.int64)
