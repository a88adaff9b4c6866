"""Logprobs of the model's own distribution: before bias, penalties, temperature and masks.

Prompts are computed in blocks of rows, as a row is a whole vocabulary in float32.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quadriga.wire.messages.logprobs import LogprobBlock, PromptPiece, SampledLogprobs
from worker_proc.attention.base import Ints
from worker_proc.sampling.logits_processors import RowLogits
from worker_proc.step.inputs import StepInputs

BLOCK_ROWS = 64
NO_TOKEN = -1


class RowLogprobs(NamedTuple):
    """Logprobs of the sampling rows that asked for them.

    Attributes:
        logprobs: `[rows, vocab_size]` float32.
        rows: Their numbers among the step's sampling rows.
        num_top: `[rows]` How many of the most likely tokens each of them asked for.
        chosen: `[rows]` Ids that each of them asked for.
    """

    logprobs: Tensor
    rows: list[int]
    num_top: list[int]
    chosen: list[Tensor]


class PromptSpan(NamedTuple):
    """Prompt tokens whose logprobs a step has to return.

    Attributes:
        row: The number of their row in the plan.
        begin: The first token of the step whose hidden state predicts one of them.
        tokens: `[count]` ids.
        width: How many of the most likely tokens were asked for.
    """

    row: int
    begin: int
    tokens: Tensor
    width: int


def row_logprobs(logits: Tensor, rows: Sequence[RowLogits]) -> RowLogprobs | None:
    """Compute the logprobs that rows ask for, before anything changes the logits."""
    asking = [row for row in rows if row.rules.num_top_logprobs is not None]
    if not asking:
        return None
    numbers = [row.row for row in asking]
    index = torch.tensor(numbers, device=logits.device)
    logprobs = logits.index_select(0, index).float().log_softmax(-1)
    num_top = [row.rules.num_top_logprobs or 0 for row in asking]
    return RowLogprobs(logprobs, numbers, num_top, [row.rules.logprob_ids for row in asking])


def sampled_logprobs(asked: RowLogprobs, sampled: Tensor, plan_rows: Ints) -> SampledLogprobs:
    """Return the logprobs of the sampled tokens.

    Args:
        asked: The rows that asked for them.
        sampled: `[samples]` token ids, on the device.
        plan_rows: `[samples]` the number of each sampling row in its plan.
    """
    index = torch.tensor(asked.rows, device=sampled.device)
    if any(map(len, asked.chosen)):
        block = _block_with_chosen(asked, sampled[index])
    else:
        block = _block([(asked.logprobs, sampled[index])], max(asked.num_top))
    return SampledLogprobs(plan_rows[asked.rows].astype("<i4").tobytes(), block)


def keep_samples(
    sampled: SampledLogprobs, plan_rows: Ints, kept: npt.NDArray[np.bool_]
) -> SampledLogprobs:
    """Return the logprobs of the samples that are kept.

    Args:
        sampled: Logprobs of all samples of the rows that asked for them.
        plan_rows: `[samples]` the number of each sample's row in the plan.
        kept: `[samples]`.
    """
    rows, block = np.frombuffer(sampled.rows, dtype="<i4"), sampled.block
    chosen = kept[np.isin(plan_rows, rows)]
    values, ids, top = (
        np.frombuffer(part, dtype="<i4").reshape(len(rows), -1)[chosen].tobytes()
        for part in (block.values, block.top_ids, block.top_values)
    )
    return SampledLogprobs(rows[chosen].tobytes(), LogprobBlock(values, block.width, ids, top))


def prompt_spans(inputs: StepInputs) -> list[PromptSpan]:
    """Return the prompt tokens that follow those of this step, where logprobs were asked for."""
    layout, table = inputs.layout, inputs.table
    asking = table.sampling.prompt_logprobs
    if not asking:
        return []
    begins = np.cumsum(layout.num_tokens) - layout.num_tokens
    spans = []
    for row, slot in enumerate(layout.slots.tolist()):
        if (params := asking.get(slot)) is None:
            continue
        first = int(layout.num_computed[row]) + 1
        count = min(int(layout.num_tokens[row]), params.num_prompt - first)
        if count > 0:
            tokens = table.tokens[slot, first : first + count].long()
            plan_row, width = int(inputs.plan_rows[row]), params.prompt_logprobs or 0
            spans.append(PromptSpan(plan_row, int(begins[row]), tokens, width))
    return spans


def prompt_logprobs(
    spans: Iterable[PromptSpan], hidden: Tensor, logits: Callable[[Tensor], Tensor]
) -> list[PromptPiece]:
    """Compute the logprobs of prompt tokens.

    Args:
        spans: The tokens.
        hidden: `[tokens, hidden]` of the whole step.
        logits: Computes the model's logits of hidden states.
    """
    pieces = []
    for span in spans:
        states = hidden[span.begin : span.begin + len(span.tokens)].split(BLOCK_ROWS)
        parts = (
            (logits(block).float().log_softmax(-1), tokens)
            for block, tokens in zip(states, span.tokens.split(BLOCK_ROWS), strict=True)
        )
        pieces.append(PromptPiece(span.row, _block(parts, span.width)))
    return pieces


def _block_with_chosen(asked: RowLogprobs, tokens: Tensor) -> LogprobBlock:
    """Pick the logprobs of tokens `[rows]`, then each row's most likely and chosen ones."""
    logprobs = asked.logprobs
    top = logprobs.topk(min(max(asked.num_top), logprobs.shape[1]), -1).indices
    pieces = zip(asked.num_top, asked.chosen, strict=True)
    width = max(num_top + len(chosen) for num_top, chosen in pieces)
    ids = torch.full((len(tokens), width), NO_TOKEN, device=logprobs.device)
    for row, (num_top, chosen) in enumerate(zip(asked.num_top, asked.chosen, strict=True)):
        likeliest = top[row, :num_top]
        ids[row, : len(likeliest)] = likeliest
        ids[row, num_top : num_top + len(chosen)] = chosen
    values = logprobs.gather(1, ids.clamp(min=0)).masked_fill_(ids == NO_TOKEN, float("nan"))
    own = logprobs.gather(1, tokens.unsqueeze(1))
    return LogprobBlock(_bytes([own]), width, _bytes([ids.int()]), _bytes([values]))


def _block(parts: Iterable[tuple[Tensor, Tensor]], width: int) -> LogprobBlock:
    """Pick the logprobs of tokens, and of the most likely ones.

    Args:
        parts: Logprobs `[tokens, vocab_size]` with the token ids `[tokens]`.
        width: Number of the most likely tokens.
    """
    values, top_ids, top_values = [], [], []
    for logprobs, tokens in parts:
        values.append(logprobs.gather(1, tokens.unsqueeze(1)))
        top = logprobs.topk(min(width, logprobs.shape[1]), -1)
        top_ids.append(top.indices.int())
        top_values.append(top.values)
    return LogprobBlock(_bytes(values), top_ids[0].shape[1], _bytes(top_ids), _bytes(top_values))


def _bytes(parts: Sequence[Tensor]) -> bytes:
    return bytes(torch.cat(list(parts)).cpu().numpy().tobytes())
