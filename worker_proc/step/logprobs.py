"""Log-probabilities of the model's own distribution: before bias, penalties, temperature, masks.

They are worked out in blocks of rows, as a row is a whole vocabulary in float32.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from quadriga.wire.messages.logprobs import LogprobBlock, PromptPiece, SampledLogprobs
from worker_proc.attention.base import BatchLayout, Ints
from worker_proc.sampling.logits_processors import RowLogits
from worker_proc.step.slot_table import SlotTable

ROWS_AT_ONCE = 64


class Observed(NamedTuple):
    """Of some rows of logits: normalised in float32 [rows, vocab_size], and the step's rows that
    they are."""

    logprobs: Tensor
    rows: list[int]
    width: int


class Untold(NamedTuple):
    """Prompt tokens [count] of a row, which follow the step's tokens from `begin` on."""

    row: int
    begin: int
    tokens: Tensor
    width: int


def observe(logits: Tensor, rows: Sequence[RowLogits]) -> Observed | None:
    """Keep what clients want to know of the logits, before anything changes them."""
    asking = [one for one in rows if one.params.logprobs is not None]
    if not asking:
        return None
    index = torch.tensor([one.row for one in asking], device=logits.device)
    logprobs = logits.index_select(0, index).float().log_softmax(-1)
    width = max(one.params.logprobs or 0 for one in asking)
    return Observed(logprobs, [one.row for one in asking], width)


def tell_sampled(observed: Observed, sampled: Tensor, plan_rows: Ints) -> SampledLogprobs:
    """What was observed, of these tokens. sampled: [rows of the step] ids, on the device;
    plan_rows: the number of each in its plan."""
    index = torch.tensor(observed.rows, device=sampled.device)
    block = _block([(observed.logprobs, sampled[index])], observed.width)
    return SampledLogprobs(plan_rows[observed.rows].astype("<i4").tobytes(), block)


def untold_prompts(rows: BatchLayout, table: SlotTable) -> list[Untold]:
    """The prompt tokens that follow those of this step, where clients asked for them."""
    asking = table.sampling.prompt_logprobs
    if not asking:
        return []
    ends = np.cumsum(rows.num_tokens)
    untold = []
    for row, slot in enumerate(rows.slots.tolist()):
        if (rules := asking.get(slot)) is None:
            continue
        first = int(rows.computed[row]) + 1
        count = min(int(rows.num_tokens[row]), rules.num_prompt - first)
        if count > 0:
            tokens = table.tokens[slot, first : first + count].long()
            begin = int(ends[row] - rows.num_tokens[row])
            untold.append(Untold(row, begin, tokens, rules.prompt_logprobs or 0))
    return untold


def tell_prompts(
    untold: Iterable[Untold],
    plan_rows: Ints,
    hidden: Tensor,
    logits: Callable[[Tensor], Tensor],
) -> list[PromptPiece]:
    """plan_rows: [rows] their numbers in the plan; hidden: [tokens, hidden] of the whole step;
    logits: the model's, of hidden states."""
    return [
        PromptPiece(
            int(plan_rows[one.row]),
            _blockwise(
                hidden[one.begin : one.begin + len(one.tokens)], one.tokens, logits, one.width
            ),
        )
        for one in untold
    ]


def _blockwise(
    hidden: Tensor, tokens: Tensor, logits: Callable[[Tensor], Tensor], width: int
) -> LogprobBlock:
    parts = (
        (logits(some_hidden).float().log_softmax(-1), some_tokens)
        for some_hidden, some_tokens in zip(
            hidden.split(ROWS_AT_ONCE), tokens.split(ROWS_AT_ONCE), strict=True
        )
    )
    return _block(parts, width)


def _block(parts: Iterable[tuple[Tensor, Tensor]], width: int) -> LogprobBlock:
    """parts: log-probabilities [tokens, vocab_size], and the ids [tokens] that they are told of."""
    values, top_ids, top_values = [], [], []
    for logprobs, tokens in parts:
        values.append(logprobs.gather(1, tokens.unsqueeze(1)))
        top = logprobs.topk(min(width, logprobs.shape[1]), -1)
        top_ids.append(top.indices.int())
        top_values.append(top.values)
    return LogprobBlock(_bytes(values), top_ids[0].shape[1], _bytes(top_ids), _bytes(top_values))


def _bytes(parts: Sequence[Tensor]) -> bytes:
    return bytes(torch.cat(list(parts)).cpu().numpy().tobytes())
