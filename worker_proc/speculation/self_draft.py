"""Draft tokens with the model itself, in fewer bits.

The second model, which shares the weights of the first until an engine rounds them; then
`SelfDrafter`.
"""

import logging
from copy import deepcopy

import numpy as np
import torch
from torch import nn

from quadriga.errors import ConfigError
from quadriga.server.config.server_config import ServerConfig
from quadriga.wire.packing import pack_ids
from quadriga.wire.worker import DECODE, StepPlan
from worker_proc.models.base import Model
from worker_proc.models.layers import Embedding, Linear
from worker_proc.step.clock import HostStep
from worker_proc.step.engine import Engine
from worker_proc.step.runner import Drafter
from worker_proc.step.slot_table import SlotTable, ints_of

DRAFT_BITS = 4
DRAFT_WEIGHT_BITS = 5  # with the scale and minimum of each group
MB = 1_000_000
_CONTAINERS = (nn.Module, dict, list)


def wants_draft(config: ServerConfig, device: torch.device, has_native_kernels: bool) -> bool:
    """Return whether the flags ask for a draft.

    Raises:
        ConfigError: they do, and the native kernels of a CPU do not compute the model.
    """
    if config.scheduler.speculative_method != "self":
        return False
    if not has_native_kernels:
        other = "auto" if device.type == "cpu" else "ngram"
        raise ConfigError(
            "speculative_method self drafts with the native kernels of a CPU, which do not compute"
            f" this model on {device}: take --speculative-method {other}"
        )
    return True


def draft_bytes(model: Model) -> int:
    """Return the memory that the draft's weights will take, and log it.

    Raises:
        ConfigError: the model's weights have few bits already.
    """
    for layer in model.modules():
        if isinstance(layer, Linear | Embedding) and (layer.blocks or layer.coded):
            raise ConfigError(
                "speculative_method self drafts with 4 bits, and the weights of this model are"
                " quantized already: take --speculative-method auto"
            )
    num_bytes = sum(values.numel() for values in model.parameters()) * DRAFT_WEIGHT_BITS // 8
    logging.info("draft in %d bits: %.0f MB beside the weights", DRAFT_BITS, num_bytes / MB)
    return num_bytes


def same_weights(model: Model) -> Model:
    """Return a copy of the layers that shares their weights, for an engine that takes them."""
    shared: dict[int, object] = {id(weight): weight for weight in model.parameters()}
    for module in model.modules():  # what else is not a layer needs no copy either
        values = vars(module).values()
        shared |= {id(value): value for value in values if not isinstance(value, _CONTAINERS)}
    copy: Model = deepcopy(model, shared)
    return copy


# Draft tokens with the model itself, in fewer bits.
#
# A draft step is an ordinary decode step, of an engine with the same model in fewer bits over the
# same KV pages: its keys and values go to the places of the drafted tokens, and the step that
# verifies the drafts overwrites them with its own. Drafts are drawn by the seeds and positions of
# the tokens in whose places they stand, with the same penalties, so that they are right as often as
# greedy ones. (Self-speculation with shared keys and values as in QSpec, arXiv 2410.11305.)

NO_STEP = -1  # no plan of the scheduler has this number


class SelfDrafter(Drafter):
    """Draft by decode steps of a second engine."""

    def __init__(self, table: SlotTable, draft: Engine) -> None:
        """Draft for the slots of a table.

        Args:
            table: the slots.
            draft: an engine whose KV pages are those of the engine that verifies.
        """
        self._table = table
        self._draft = draft

    def begin(self, plan: StepPlan) -> None:
        """Do nothing: a draft needs the slot's tokens and pages only."""

    def draft(self, plan: StepPlan) -> None:
        """Draft in rounds, and leave the table as it was, with what was drafted as its drafts."""
        numbers = self._numbers(plan)
        if not numbers:
            return
        table, slots = self._table, list(numbers)
        known, computed = table.num_known[slots], table.num_computed[slots]  # copies
        nonfinite_from = table.nonfinite_from.clone()  # the step computes all of it again
        for place in range(max(numbers.values())):
            self._decode([slot for slot, count in numbers.items() if count > place])
        drafted = [table.known_tokens(*at) for at in zip(slots, known.tolist(), strict=True)]
        table.num_known[slots], table.num_computed[slots] = known, computed
        table.nonfinite_from.copy_(nonfinite_from)
        table.draft(dict(zip(slots, drafted, strict=True)))

    def _numbers(self, plan: StepPlan) -> dict[int, int]:
        """Return the number of tokens to draft by slot, where it is not 0."""
        if not plan.num_guesses:
            return {}
        rows = zip(ints_of(plan.slots).tolist(), ints_of(plan.num_guesses).tolist(), strict=True)
        return {slot: count for slot, most in rows if (count := self._number(slot, most)) > 0}

    def _number(self, slot: int, most: int) -> int:
        """Return the number of tokens to draft after a row's own.

        There are none in a row of several tokens, and none for a grammar that still masks, which
        would have to be copied and followed token by token.
        """
        table = self._table
        if most <= 0 or table.num_computed[slot] + 1 != table.num_known[slot]:
            return 0
        grammar = table.sampling.grammar_of(slot)
        if grammar is not None and not grammar.is_over:
            return 0
        return min(most, table.room_for_drafts(slot))

    def _decode(self, slots: list[int]) -> None:
        """Let each slot know one more token, by a step of the draft."""
        ones = pack_ids(np.ones(len(slots), dtype=np.int32))
        plan = StepPlan(NO_STEP, DECODE, pack_ids(slots), ones, [], b"")
        self._draft.execute(plan, self._table, HostStep())
