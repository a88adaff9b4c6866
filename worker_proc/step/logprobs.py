"""Logprobs of the model's own distribution: before bias, penalties, temperature and masks.

Prompts are computed in blocks of rows, as a row is a whole vocabulary in float32.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quadriga.wire.messages.logprobs import LogprobBlock, PromptPiece, SampledLogprobs
from worker_proc.attention.base import Ints
from worker_proc.sampling.logits_processors import RowLogits
from worker_proc.step.inputs import StepInputs
from worker_proc.system.transfer import DeviceToHostCopier, Fetch, send

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
    index = send(np.array(numbers), logits.device)
    logprobs = logits.index_select(0, index).float().log_softmax(-1)
    num_top = [row.rules.num_top_logprobs or 0 for row in asking]
    return RowLogprobs(logprobs, numbers, num_top, [row.rules.logprob_ids for row in asking])


def sampled_logprobs(
    asked: RowLogprobs, sampled: Tensor, plan_rows: Ints, copier: DeviceToHostCopier
) -> Callable[[], SampledLogprobs]:
    """Start to copy the logprobs of the sampled tokens; return a function that waits for them.

    Args:
        asked: The rows that asked for them.
        sampled: `[samples]` token ids, on the device.
        plan_rows: `[samples]` the number of each sampling row in its plan.
        copier: Copies them to the host.
    """
    tokens = sampled[send(np.array(asked.rows), sampled.device)].clamp(min=0)
    if any(map(len, asked.chosen)):
        picked = _pick_with_chosen(asked, tokens)
    else:
        picked = _pick(asked.logprobs, tokens, max(asked.num_top))
    fetch, rows = copier.begin(picked), plan_rows[asked.rows].astype("<i4").tobytes()
    return lambda: SampledLogprobs(rows, _block(fetch()))


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
    spans: Iterable[PromptSpan],
    hidden: Tensor,
    logits: Callable[[Tensor], Tensor],
    copier: DeviceToHostCopier,
) -> list[Callable[[], PromptPiece]]:
    """Compute the logprobs of prompt tokens; return functions that wait for them.

    Args:
        spans: The tokens.
        hidden: `[tokens, hidden]` of the whole step.
        logits: Computes the model's logits of hidden states.
        copier: Copies them to the host.
    """
    pieces: list[Callable[[], PromptPiece]] = []
    for span in spans:
        states = hidden[span.begin : span.begin + len(span.tokens)].split(BLOCK_ROWS)
        picked = [
            _pick(logits(block).float().log_softmax(-1), tokens, span.width)
            for block, tokens in zip(states, span.tokens.split(BLOCK_ROWS), strict=True)
        ]
        fetch = copier.begin(torch.cat(picked))
        pieces.append(partial(_piece, span.row, fetch))
    return pieces


def _piece(row: int, fetch: Fetch) -> PromptPiece:
    return PromptPiece(row, _block(fetch()))


def _pick_with_chosen(asked: RowLogprobs, tokens: Tensor) -> Tensor:
    """Pick the logprobs of tokens `[rows]`, then each row's most likely and chosen ones.

    Returns:
        See `_packed`.
    """
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
    return _packed(logprobs.gather(1, tokens.unsqueeze(1)), ids, values)


def _pick(logprobs: Tensor, tokens: Tensor, width: int) -> Tensor:
    """Pick the logprobs of tokens, and of the most likely ones.

    Args:
        logprobs: `[tokens, vocab_size]`.
        tokens: `[tokens]` ids.
        width: Number of the most likely tokens.

    Returns:
        See `_packed`.
    """
    top = logprobs.topk(min(width, logprobs.shape[1]), -1)
    return _packed(logprobs.gather(1, tokens.unsqueeze(1)), top.indices, top.values)


def _packed(own: Tensor, ids: Tensor, values: Tensor) -> Tensor:
    """Join what one copy takes to the host.

    Args:
        own: `[tokens, 1]` float32 logprobs of the tokens.
        ids: `[tokens, width]` of other tokens.
        values: `[tokens, width]` float32 logprobs of those.

    Returns:
        `[tokens, 1 + 2 * width]` int32, with the bits of the logprobs.
    """
    return torch.cat((own.view(torch.int32), ids.int(), values.view(torch.int32)), 1)


def first_nan(block: LogprobBlock) -> int | None:
    """Return the place of the first token whose logprob is NaN; None if there is none."""
    is_nan = np.isnan(np.frombuffer(block.values, dtype="<f4"))
    return int(is_nan.argmax()) if is_nan.any() else None


def _block(packed: npt.NDArray[np.int32]) -> LogprobBlock:
    """Return the message for what `_packed` has joined."""
    width = packed.shape[1] // 2
    own, ids, values = np.split(packed, [1, 1 + width], axis=1)
    return LogprobBlock(own.tobytes(), width, ids.tobytes(), values.tobytes())
