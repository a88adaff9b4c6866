"""The tokens of a step whose rows are not all plainly greedy."""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from quadriga.wire.messages.logprobs import SampledLogprobs
from worker_proc.sampling.grammar_mask import Constrained
from worker_proc.sampling.logits_processors import apply_logits_processors, constrained
from worker_proc.step.engine_base import Engine
from worker_proc.step.inputs import StepInputs
from worker_proc.step.logprobs import observe, tell_sampled
from worker_proc.step.slot_table import SlotTable
from worker_proc.system.transfer import TokenIds


class SampledTokens(NamedTuple):
    """token_ids: [samples]; logprobs: of the rows that asked for them;
    constrained: the rows that have a grammar, which is to take what was chosen."""

    token_ids: TokenIds
    logprobs: SampledLogprobs | None = None
    constrained: Sequence[Constrained] = ()


def choose(engine: Engine, logits: Tensor, inputs: StepInputs, table: SlotTable) -> SampledTokens:
    """logits: [samples, vocab_size] of the step's sampling rows. The order of what happens to them
    is in sampler.py."""
    slots, positions = inputs.sampled_slots, inputs.sample_positions
    rules = table.sampling.row_logits(slots)
    observed = observe(logits, rules)
    changing = [one for one in rules if one.params.changes_logits]
    if changing:
        logits = apply_logits_processors(logits, changing, positions, table.tokens)
    there = table.to_device(slots), table.to_device(positions)
    token_ids = engine.sample(logits, table.sampling.sampling_rows(slots, *there))
    told = tell_sampled(observed, token_ids, inputs.sampled_rows) if observed is not None else None
    return SampledTokens(token_ids, told, constrained(changing))
