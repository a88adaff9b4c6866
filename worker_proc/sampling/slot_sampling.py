"""Keep the sampling parameters of all slots."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from quadriga.sampling.params import GREEDY_BELOW_TEMPERATURE
from quadriga.wire.messages.worker import NewSlot, SlotSamplingParams
from worker_proc.attention.base import Ints
from worker_proc.sampling.compiled_grammar import CompiledGrammar
from worker_proc.sampling.grammar_mask import SlotConstraint
from worker_proc.sampling.logits_processors import RowLogits, SlotLogits
from worker_proc.sampling.sampler import SamplingRows
from worker_proc.system.transfer import send_all


class SamplingState:
    """Sampling parameters of every slot.

    Attributes:
        temperature, top_k, top_p, min_p, seed: [slots] on the device; temperature 0 is greedy,
            top_k 0 is off.
        greedy: [slots] on the host.
        greedy_only: [slots] on the host: greedy, without logits processors and logprobs.
        unprocessed: [slots] on the host: without logits processors and logprobs. The token follows
            from the model's logits and the parameters above.
        uses_min_p: [slots] on the host.
        prompt_logprobs: Parameters of the slots that ask for prompt logprobs.
        compiled: Grammars that slots can have, by key.
    """

    def __init__(self, num_slots: int, device: torch.device) -> None:
        self._device = device
        self.temperature = torch.zeros(num_slots, dtype=torch.float32, device=device)
        self.top_k = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self.top_p = torch.ones(num_slots, dtype=torch.float32, device=device)
        self.min_p = torch.zeros(num_slots, dtype=torch.float32, device=device)
        self.seed = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self.greedy = np.zeros(num_slots, dtype=np.bool_)
        self.greedy_only = np.zeros(num_slots, dtype=np.bool_)
        self.unprocessed = np.zeros(num_slots, dtype=np.bool_)
        self.uses_min_p = np.zeros(num_slots, dtype=np.bool_)
        self.prompt_logprobs: dict[int, SlotSamplingParams] = {}
        self._logits: dict[int, SlotLogits] = {}
        self.compiled: Mapping[bytes, CompiledGrammar] = {}

    def admit(self, new: Sequence[NewSlot]) -> None:
        """Store the parameters of new requests."""
        for request in new:
            slot, rules = request.slot, request.rules
            greedy = request.temperature < GREEDY_BELOW_TEMPERATURE or request.top_k == 1
            self.greedy[slot] = greedy
            self.greedy_only[slot] = greedy and rules is None
            self.unprocessed[slot] = True
            self.uses_min_p[slot] = rules is not None and rules.min_p > 0
            if rules is not None:
                grammar = self._grammar(request, rules) if rules.grammar else None
                self._logits[slot] = of_slot = SlotLogits(rules, self._device, grammar)
                self.unprocessed[slot] = of_slot.only_filters
                if rules.prompt_logprobs is not None:
                    self.prompt_logprobs[slot] = rules
        temperatures = [0.0 if self.greedy[one.slot] else one.temperature for one in new]
        slots, *values = send_all(
            self._device,
            np.array([request.slot for request in new], dtype=np.int64),
            np.array(temperatures, dtype=np.float32),
            np.array([max(request.top_k, 0) for request in new], dtype=np.int64),
            np.array([request.top_p for request in new], dtype=np.float32),
            np.array([r.rules.min_p if r.rules else 0.0 for r in new], dtype=np.float32),
            np.array([request.seed for request in new], dtype=np.int64),
        )
        tables = (self.temperature, self.top_k, self.top_p, self.min_p, self.seed)
        for table, of_slots in zip(tables, values, strict=True):
            table[slots] = of_slots

    def _grammar(self, request: NewSlot, rules: SlotSamplingParams) -> SlotConstraint:
        if rules.grammar not in self.compiled:
            raise ValueError(f"slot {request.slot}: the plan names a grammar that is not compiled")
        generated = np.frombuffer(request.token_ids, dtype="<i4")[rules.num_prompt :]
        stop_ids = np.frombuffer(rules.stop_ids, dtype="<i4")
        return self.compiled[rules.grammar].begin(stop_ids, generated, rules.jumps)

    def release(self, slots: list[int]) -> None:
        """Forget the parameters of these slots."""
        if not self._logits:
            return
        for slot in slots:
            self._logits.pop(slot, None)
            self.prompt_logprobs.pop(slot, None)

    def sampling_rows(self, slots: Ints, positions: Ints) -> SamplingRows | None:
        """Return the sampler's parameters of these slots; None if all of them are greedy.

        Args:
            slots: [rows] on the host.
            positions: [rows] on the host, the index of the token to be sampled.
        """
        greedy = self.greedy[slots]
        if greedy.all():
            return None
        device_slots, device_positions, device_greedy = send_all(
            self._device, slots, positions, greedy
        )
        return SamplingRows(
            greedy=device_greedy,
            temperature=self.temperature[device_slots],
            top_k=self.top_k[device_slots],
            top_p=self.top_p[device_slots],
            min_p=self.min_p[device_slots] if self.uses_min_p[slots].any() else None,
            seed=self.seed[device_slots],
            position=device_positions,
        )

    def row_logits(self, slots: Ints) -> list[RowLogits]:
        """Return the rows that have logits processors or logprobs.

        Args:
            slots: [rows] of a slot with guesses, those after them follow the first one.
        """
        if not self._logits:
            return []
        rows = []
        before, place = -1, 0
        for row, slot in enumerate(slots.tolist()):
            place = place + 1 if slot == before else 0
            before = slot
            if rules := self._logits.get(slot):
                after = rules.after_guesses
                grammar = after[place - 1] if place and after else rules.grammar
                rows.append(RowLogits(row, slot, rules, grammar))
        return rows

    def grammar_of(self, slot: int) -> SlotConstraint | None:
        """Return the state of a slot's grammar, or of the reasoning before it."""
        rules = self._logits.get(slot)
        return None if rules is None else rules.grammar

    def follow_guesses(self, slot: int, token_ids: Sequence[int]) -> list[int]:
        """Note the states of a slot's grammar after guesses, for one step.

        Returns:
            The guesses as far as the grammar allows them, and before a token that ends the request.
        """
        rules = self._logits.get(slot)
        if rules is None or rules.grammar is None:
            return list(token_ids)
        state, rules.after_guesses = rules.grammar, []
        for token in token_ids:
            state = state.copy()
            if state.ends_with(token) or state.advance(token):
                break
            rules.after_guesses.append(state)
        return list(token_ids[: len(rules.after_guesses)])
