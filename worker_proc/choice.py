"""The tokens of a step whose rows are not all plainly greedy."""

from typing import NamedTuple

from torch import Tensor

from quadriga.messages.logprobs import SampledLogprobs
from worker_proc.engine import Engine
from worker_proc.inputs import StepInputs
from worker_proc.kv_pool import SlotTable
from worker_proc.logprobs import observe, tell_sampled
from worker_proc.rules import apply_rules


class Chosen(NamedTuple):
    """token_ids: [samples] int64, on the device; logprobs: of the rows that asked for them."""

    token_ids: Tensor
    logprobs: SampledLogprobs | None = None


def choose(engine: Engine, logits: Tensor, inputs: StepInputs, table: SlotTable) -> Chosen:
    """logits: [samples, vocab_size] of the step's sampling rows. The order of what happens to them
    is in sampler.py."""
    slots, positions = inputs.sampled_slots, inputs.sample_positions
    rules = table.sampling.rules(slots)
    observed = observe(logits, rules)
    changing = [one for one in rules if one.rules.changes_logits]
    if changing:
        logits = apply_rules(logits, changing, positions, table.tokens)
    there = table.to_device(slots), table.to_device(positions)
    token_ids = engine.sample(logits, table.sampling.rows(slots, *there))
    if observed is None:
        return Chosen(token_ids)
    return Chosen(token_ids, tell_sampled(observed, token_ids, inputs.sampled_rows))
