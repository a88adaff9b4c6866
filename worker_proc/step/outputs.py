"""The output of a step: logprobs, sampled tokens, and a handle to wait for them."""

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quadriga.errors import NonFiniteLogits, NonFiniteVector
from quadriga.wire.logprobs import LogprobBlock, PromptPiece, SampledLogprobs
from quadriga.wire.packing import pack_ids
from quadriga.wire.worker import FailedRow, ForcedRow, GuessedRow, NonFiniteRow, VectorRow
from worker_proc.models.attention import Ints
from worker_proc.models.transfer import DeviceToHostCopier, Fetch, TokenIds, send
from worker_proc.sampling.grammar import Constrained, advance
from worker_proc.sampling.logits_processors import RowLogits
from worker_proc.step.inputs import StepInputs
from worker_proc.step.pooling import LogitsOfRows, has_nonfinite, of_one
from worker_proc.step.slot_table import ALL_FINITE, SlotTable

# Logprobs of the model's own distribution: before bias, penalties, temperature and masks.
#
# Prompts are computed in blocks of rows, as a row is a whole vocabulary in float32.

BLOCK_ROWS = 64
NO_TOKEN = -1


class RowLogprobs(NamedTuple):
    """Logprobs of the sampling rows that asked for them.

    Attributes:
        logprobs: `[rows, vocab_size]` float32.
        rows: their numbers among the step's sampling rows.
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
        row: the number of their row in the plan.
        begin: the first token of the step whose hidden state predicts one of them.
        tokens: `[count]` ids.
        width: how many of the most likely tokens were asked for.
        adapter: the index of their adapter, or NO_ADAPTER.
    """

    row: int
    begin: int
    tokens: Tensor
    width: int
    adapter: int


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
        asked: the rows that asked for them.
        sampled: `[samples]` token ids, on the device.
        plan_rows: `[samples]` the number of each sampling row in its plan.
        copier: copies them to the host.
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
        sampled: logprobs of all samples of the rows that asked for them.
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
            adapter = int(table.adapters[slot])
            spans.append(PromptSpan(plan_row, int(begins[row]), tokens, width, adapter))
    return spans


def prompt_logprobs(
    spans: Iterable[PromptSpan],
    hidden: Tensor,
    logits: LogitsOfRows,
    copier: DeviceToHostCopier,
) -> list[Callable[[], PromptPiece]]:
    """Compute the logprobs of prompt tokens; return functions that wait for them.

    Args:
        spans: the tokens.
        hidden: `[tokens, hidden]` of the whole step.
        logits: computes the model's logits of hidden states.
        copier: copies them to the host.
    """
    pieces: list[Callable[[], PromptPiece]] = []
    for span in spans:
        states = hidden[span.begin : span.begin + len(span.tokens)].split(BLOCK_ROWS)
        picked = [
            _pick(
                logits(block, of_one(span.adapter, len(block))).float().log_softmax(-1),
                tokens,
                span.width,
            )
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
        width: number of the most likely tokens.

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


MAX_FORCED_TOKENS = 32  # for one row and step, so that one row cannot make a step long for others
NO_TOKENS = np.empty(0, dtype=np.int64)


class SampledTokens(NamedTuple):
    """The tokens of the rows that sample.

    Attributes:
        token_ids: `[samples]`; -1 where the logits have NaN or infinity, or no finite number.
        logprobs: waits for the logprobs of the rows that asked for them.
        constrained: rows with a grammar, which has not accepted its token yet.
        stored: True if the engine has written the tokens to the slot table.
    """

    token_ids: TokenIds
    logprobs: Callable[[], SampledLogprobs] | None = None
    constrained: Sequence[Constrained] = ()
    stored: bool = False


class EngineOutput(msgspec.Struct):
    """The fields of a StepResult that the engine fills in."""

    token_ids: bytes
    logprobs: SampledLogprobs | None = None
    prompt_logprobs: list[PromptPiece] = []
    failed: list[FailedRow] = []
    forced: list[ForcedRow] = []
    drafted: list[GuessedRow] = []
    nonfinite: list[NonFiniteRow] = []
    vectors: list[VectorRow] = []


class PendingStep(msgspec.Struct, frozen=True):
    """A step that was launched.

    Attributes:
        wait: wait for the end of the step, in any thread, and return its output.
        blocks_next: True if `wait` must return before the next step is launched, since that one
            begins after the last right draft, or computes the tokens that a grammar forces.
    """

    wait: Callable[[], EngineOutput]
    blocks_next: bool = False


def pending_step(
    inputs: StepInputs,
    sampled: SampledTokens,
    prompt_logprobs: Sequence[Callable[[], PromptPiece]],
    jump_forward: bool,
    drafted: Sequence[GuessedRow] = (),
    vectors: Sequence[Callable[[], VectorRow]] = (),
) -> PendingStep:
    """Start to copy the sampled tokens to the host.

    Args:
        inputs: the step.
        sampled: the tokens of its sampling rows.
        prompt_logprobs: wait for the logprobs of its prompt tokens.
        jump_forward: append the tokens that grammars force to the slots.
        drafted: its rows with drafts, which may have several tokens.
        vectors: wait for the vectors of its rows.
    """
    table = inputs.table
    fetch = table.copier.begin_all(sampled.token_ids, table.nonfinite_from)
    num_computed = table.num_computed[inputs.layout.slots]

    def wait() -> EngineOutput:
        token_ids = np.empty(len(inputs.layout.slots), dtype="<i4")
        token_ids.fill(-1)
        (on_host, nonfinite_from), rows = fetch(), inputs.sampled_rows
        if drafted:  # the first token of each row; `drafted` has those after it
            is_first = np.diff(inputs.samples, prepend=-1) != 0
            token_ids[rows[is_first]] = on_host[is_first]
        else:
            token_ids[rows] = on_host
        output = EngineOutput(
            token_ids.tobytes(),
            sampled.logprobs and sampled.logprobs(),
            [piece() for piece in prompt_logprobs],
            drafted=list(drafted),
            vectors=[vector() for vector in vectors],
        )
        for vector in output.vectors:
            if has_nonfinite(vector):
                error = NonFiniteVector.of_prompt()
                output.failed.append(FailedRow(vector.row, str(error), error.code))
        if constrained := [one for one in sampled.constrained if on_host[one.row] >= 0]:
            output.failed = advance(constrained, on_host, inputs.sampled_rows)
            if jump_forward:
                output.forced = _append_forced(constrained, inputs)
        broken = {
            int(rows[sample]): int(inputs.sample_positions[sample])
            for sample in np.flatnonzero(on_host < 0)
        }
        for piece in output.prompt_logprobs:
            if (place := first_nan(piece.block)) is not None:
                begin = inputs.layout.num_computed[inputs.plan_rows == piece.row]
                broken[piece.row] = int(begin[0]) + 1 + place
        first = nonfinite_from[inputs.layout.slots]
        if broken or (first < num_computed).any():
            add_nonfinite(output, broken, inputs.plan_rows, first, inputs.layout.num_computed)
        return output

    return _begin_accepting(wait, table, jump_forward) if sampled.constrained else PendingStep(wait)


def _begin_accepting(
    wait: Callable[[], EngineOutput], table: SlotTable, jump_forward: bool
) -> PendingStep:
    """Return the handle of a step whose tokens grammars accept while the host waits for it.

    The next step with grammars waits, too, when it is launched and only its masks are missing.
    """
    once = _Once(wait)
    table.sampling.accept_tokens = once
    return PendingStep(once, blocks_next=jump_forward)


class _Once:
    """A function that runs in the first thread that calls it; further calls wait for its result."""

    def __init__(self, function: Callable[[], EngineOutput]) -> None:
        self._function = function
        self._lock = threading.Lock()
        self._output: EngineOutput | None = None

    def __call__(self) -> EngineOutput:
        with self._lock:
            if self._output is None:
                self._output = self._function()
            return self._output


def add_nonfinite(
    output: EngineOutput, broken: Mapping[int, int], plan_rows: Ints, first: Ints, begins: Ints
) -> None:
    """Add to the output of a step which requests end, and which pages must not be shared.

    Args:
        output: of the step.
        broken: the position of the token that could not be sampled, by row of the plan.
        plan_rows: `[rows]` the row's number in the plan.
        first: `[rows]` the first position whose keys or values are not finite, or a higher one than
            the row has computed.
        begins: `[rows]` the first position that the step has computed.
    """
    for row, position in broken.items():
        error = NonFiniteLogits.at(position)
        output.failed.append(FailedRow(row, str(error), error.code))
    for row, lowest, begin in zip(plan_rows.tolist(), first.tolist(), begins.tolist(), strict=True):
        if row in broken:
            lowest = min(lowest, begin)
        if lowest < ALL_FINITE:
            output.nonfinite.append(NonFiniteRow(row, lowest))


def _append_forced(constrained: Sequence[Constrained], inputs: StepInputs) -> list[ForcedRow]:
    """Append to each slot the tokens that its grammar forces after the sampled one.

    The next step of the slot computes them together with the sampled token.
    """
    table, forced = inputs.table, []
    last_of_slots = {int(inputs.sampled_slots[row]): row for row, _ in constrained}
    for row, grammar in constrained:
        slot = int(inputs.sampled_slots[row])
        if row != last_of_slots[slot]:
            continue  # a token of the row follows
        room = table.context_length - int(table.num_known[slot])
        token_ids = grammar.take_forced(min(room, MAX_FORCED_TOKENS))
        if token_ids:
            table.append_forced(slot, token_ids)
            forced.append(ForcedRow(int(inputs.sampled_rows[row]), pack_ids(token_ids)))
    return forced
