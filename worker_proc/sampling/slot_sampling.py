"""What the worker keeps of how each slot's tokens are chosen."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from quadriga.sampling.params import GREEDY_BELOW_TEMPERATURE
from quadriga.wire.messages.worker import NewSlot
from worker_proc.attention.base import Ints
from worker_proc.sampling.grammar_mask import SlotGrammar
from worker_proc.sampling.logits_processors import RowLogits, SlotLogits
from worker_proc.sampling.sampler import SamplingRows
from worker_proc.system.transfer import send

if TYPE_CHECKING:
    from llguidance import LLMatcher


class SamplingState:
    """Sampling parameters of every slot.

    On the device [slots]: temperature, top_k (0 is off), top_p, min_p and seed. On the host, in
    numpy [slots]: greedy; plain: greedy, and nothing else was asked for; simple: the
    same, or drawn by nothing but a temperature and a seed; uses_min_p.
    prompts_to_tell: the slots whose prompts' log-probabilities were asked for.
    compiled: the grammars that slots may have, by key.
    """

    def __init__(self, num_slots: int, device: torch.device) -> None:
        self._device = device
        self.temperature = torch.zeros(num_slots, dtype=torch.float32, device=device)
        self.top_k = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self.top_p = torch.ones(num_slots, dtype=torch.float32, device=device)
        self.min_p = torch.zeros(num_slots, dtype=torch.float32, device=device)
        self.seed = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self.greedy = np.zeros(num_slots, dtype=np.bool_)
        self.plain = np.zeros(num_slots, dtype=np.bool_)
        self.simple = np.zeros(num_slots, dtype=np.bool_)
        self.uses_min_p = np.zeros(num_slots, dtype=np.bool_)
        self.prompts_to_tell: dict[int, SlotLogits] = {}
        self._rules: dict[int, SlotLogits] = {}
        self.compiled: Mapping[bytes, LLMatcher] = {}

    def admit(self, new: Sequence[NewSlot]) -> None:
        """Take in what these requests ask for."""
        for one in new:
            slot, rules = one.slot, one.rules
            greedy = one.temperature < GREEDY_BELOW_TEMPERATURE or one.top_k == 1
            self.greedy[slot] = greedy
            self.plain[slot] = greedy and rules is None
            unfiltered = one.top_k <= 0 and one.top_p >= 1
            self.simple[slot] = rules is None and (greedy or unfiltered)
            self.uses_min_p[slot] = rules is not None and rules.min_p > 0
            if rules is not None:
                self._admit_rules(slot, SlotLogits(rules, self._device, self._grammar(one)))
        slots = send(np.array([one.slot for one in new], dtype=np.int64), self._device)
        for table, values, dtype in (
            (self.temperature, [one.temperature for one in new], np.float32),
            (self.top_k, [max(one.top_k, 0) for one in new], np.int64),
            (self.top_p, [one.top_p for one in new], np.float32),
            (self.min_p, [one.rules.min_p if one.rules else 0.0 for one in new], np.float32),
            (self.seed, [one.seed for one in new], np.int64),
        ):
            table[slots] = send(np.array(values, dtype=dtype), self._device)

    def _grammar(self, one: NewSlot) -> SlotGrammar | None:
        rules = one.rules
        if rules is None or not rules.grammar:
            return None
        if rules.grammar not in self.compiled:
            raise ValueError(f"slot {one.slot}: the plan names a grammar that is not compiled")
        generated = np.frombuffer(one.token_ids, dtype="<i4")[rules.num_prompt :]
        stop_ids = np.frombuffer(rules.stop_ids, dtype="<i4")
        matcher = self.compiled[rules.grammar].deep_copy()
        return SlotGrammar(matcher, stop_ids, generated, rules.jumps)

    def _admit_rules(self, slot: int, rules: SlotLogits) -> None:
        self._rules[slot] = rules
        if rules.prompt_logprobs is not None:
            self.prompts_to_tell[slot] = rules

    def release(self, slots: list[int]) -> None:
        """Forget what these slots held."""
        if not self._rules:
            return
        for slot in slots:
            self._rules.pop(slot, None)
            self.prompts_to_tell.pop(slot, None)

    def rows(self, slots: Ints, slots_there: Tensor, positions: Tensor) -> SamplingRows | None:
        """For the sampler; None where all of these slots are greedy. slots and slots_there are the
        same, on the host and on the device; positions: [rows], on the device."""
        greedy = self.greedy[slots]
        if greedy.all():
            return None
        return SamplingRows(
            greedy=send(greedy, self._device),
            temperature=self.temperature[slots_there],
            top_k=self.top_k[slots_there],
            top_p=self.top_p[slots_there],
            min_p=self.min_p[slots_there] if self.uses_min_p[slots].any() else None,
            seed=self.seed[slots_there],
            position=positions,
        )

    def rules(self, slots: Ints) -> list[RowLogits]:
        """The rows that have rules, with them."""
        if not self._rules:
            return []
        of = self._rules.get
        return [
            RowLogits(row, slot, r) for row, slot in enumerate(slots.tolist()) if (r := of(slot))
        ]
