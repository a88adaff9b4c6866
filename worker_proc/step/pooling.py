"""Vectors in place of tokens: the hidden states of a row, pooled.

A vector is computed in float32, of its own row alone: its bits do not depend on the other rows of
the step.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from quadriga.sampling.pooling import (
    CLASSIFY,
    CLS,
    LAST,
    LOGPROBS,
    MEAN,
    SIGMOID,
    SOFTMAX,
    Pooling,
)
from quadriga.wire.worker import NO_ADAPTER, VectorRow
from worker_proc.models.attention import Ints
from worker_proc.models.base import Model
from worker_proc.models.layers import ClassifierHead, LayerNorm, RMSNorm
from worker_proc.models.transfer import DeviceToHostCopier, Fetch
from worker_proc.step.inputs import StepInputs

MIN_LENGTH = 1e-12  # a vector is divided by its length, or by this
# Rows of logits that are computed at one time: the head is read once for all of them.
MAX_LOGIT_ROWS = 64

# `Engine.logits`: of hidden states `[rows, hidden]` and the adapters `[rows]`.
LogitsOfRows = Callable[[Tensor, Ints | None], Tensor]


def of_one(adapter: int, num_rows: int) -> Ints | None:
    """Return the adapters `[rows]` of rows that have the same one; None if it is NO_ADAPTER."""
    return None if adapter == NO_ADAPTER else np.full(num_rows, adapter, dtype=np.int64)


class OutputNorm:
    """The norm between a model's last layer and its head, in float32.

    It has a copy of the weights, as an engine may take those of the model apart.
    """

    @classmethod
    def of(cls, model: Model) -> "OutputNorm | None":
        """Return the norm of a model; None if its last layer has normalized its output."""
        return None if model.final_norm is None else cls(model.final_norm)

    def __init__(self, norm: LayerNorm | RMSNorm) -> None:
        self._gain = (norm.weight if isinstance(norm, LayerNorm) else norm.gain).float().clone()
        self._bias = norm.bias.float().clone() if isinstance(norm, LayerNorm) else None
        self._epsilon = norm.epsilon

    def __call__(self, hidden: Tensor) -> Tensor:
        """Normalize `[tokens, hidden]`, whose rows may have padding behind them."""
        shape = self._gain.shape
        hidden = hidden[:, : shape[0]]
        if self._bias is not None:
            return F.layer_norm(hidden.float(), shape, self._gain, self._bias, self._epsilon)
        return F.rms_norm(hidden.float(), shape, self._gain, self._epsilon)


class Classifier:
    """The head of a model that classifies or ranks, in float32."""

    @classmethod
    def of(cls, model: Model) -> "Classifier | None":
        """Return the head of a model; None if it has none."""
        return None if model.classifier is None else cls(model.classifier)

    def __init__(self, head: ClassifierHead) -> None:
        bias = head.dense_bias
        bias = None if bias is None else bias.float().clone()
        self._dense = head.dense_weight.float().clone(), bias
        self._norm = None if head.norm is None else OutputNorm(head.norm)
        self._out = head.out_weight.float().clone(), head.out_bias.float().clone()
        self._activation = {"tanh": torch.tanh, "relu": torch.relu, "gelu": F.gelu}[head.activation]
        self.reads_all = head.reads_all

    def __call__(self, states: Tensor, activation: str) -> Tensor:
        """Return the scores `[labels]` of a text's hidden states `[tokens, hidden]`.

        They are the first one, or all of them if the head reads their mean.
        """
        states = states[:, : self._dense[0].shape[1]]
        state = states.double().mean(0).float() if self.reads_all else states[0].float()
        inner = self._activation(F.linear(state, *self._dense))
        if self._norm is not None:
            inner = self._norm(inner.unsqueeze(0))[0]
        return activated(F.linear(inner, *self._out), activation)


def activated(logits: Tensor, activation: str) -> Tensor:
    """Return scores `[labels]` of logits: their sigmoid or softmax, or the logits themselves."""
    if activation == SIGMOID:
        return logits.sigmoid()
    return logits.softmax(-1) if activation == SOFTMAX else logits.clone()


class VectorHeads(NamedTuple):
    """What makes vectors of hidden states.

    Attributes:
        norm: of hidden states; None: they are normalized.
        classifier: of a model with one; None: there is none.
        dense: what follows the pooling of a vector, in its order: functions of a vector.
        logits: computes the model's logits `[rows, vocab_size]` of hidden states, not normalized,
            and of the adapters of the rows.
    """

    norm: OutputNorm | None
    classifier: Classifier | None
    dense: Sequence[Callable[[Tensor], Tensor]]
    logits: LogitsOfRows


class PooledRow(NamedTuple):
    """A row of a step that ends with its request's last token, and whose answer is a vector.

    Attributes:
        row: its number in the plan.
        begin, end: its tokens in the step, `end` excluded.
        last_ids: int32 the last tokens of the prompt, where their probabilities are wanted.
        pooling: what its client has asked for.
        adapter: the index of its adapter, or NO_ADAPTER.
    """

    row: int
    begin: int
    end: int
    pooling: Pooling
    last_ids: Tensor
    adapter: int


def pooled_rows(inputs: StepInputs) -> list[PooledRow]:
    """Return the rows of a step whose answers are vectors."""
    layout, table = inputs.layout, inputs.table
    if not table.poolings:
        return []
    ends = np.cumsum(layout.num_tokens).tolist()
    rows = []
    for row, slot in enumerate(layout.slots.tolist()):
        pooling = table.poolings.get(slot)
        if pooling is not None and inputs.num_computed_after[row] == table.num_known[slot]:
            begin = ends[row] - int(layout.num_tokens[row])
            known = int(table.num_known[slot])
            last_ids = table.tokens[slot, known - pooling.num_last : known]
            plan_row, adapter = int(inputs.plan_rows[row]), int(table.adapters[slot])
            rows.append(PooledRow(plan_row, begin, ends[row], pooling, last_ids, adapter))
    return rows


def begin_vectors(
    rows: Sequence[PooledRow],
    hidden: Tensor,
    heads: VectorHeads,
    copier: DeviceToHostCopier,
) -> list[Callable[[], VectorRow]]:
    """Compute vectors; return functions that wait for them.

    Args:
        rows: the rows that have them.
        hidden: `[tokens, hidden]` of the whole step.
        heads: of the model.
        copier: copies the vectors to the host.

    Raises:
        ValueError: scores are asked of a model without a head.
    """
    vectors: list[Callable[[], VectorRow]] = []
    scored = [row for row in rows if row.pooling.method == LOGPROBS]
    for row, scores in zip(scored, token_logprobs(scored, hidden, heads.logits), strict=True):
        vectors.append(partial(_fetched, row.row, copier.begin(scores)))
    for row in rows:
        if row.pooling.method == LOGPROBS:
            continue
        if row.pooling.method == CLASSIFY:
            scores = _scores(row, hidden, heads)
            vectors.append(partial(_fetched, row.row, copier.begin(scores)))
            continue
        begin = row.end - 1 if row.pooling.method == LAST else row.begin
        states = hidden[begin : row.end]
        states = states.float() if heads.norm is None else heads.norm(states)
        vector = pooled(states, row.pooling, heads.dense)
        vectors.append(partial(_fetched, row.row, copier.begin(vector)))
    return vectors


def _scores(row: PooledRow, hidden: Tensor, heads: VectorHeads) -> Tensor:
    """Return the scores `[labels]` that a row asks for.

    Of a model that makes text, it is the logit of the first of its `token_ids` less the second's.
    """
    if token_ids := row.pooling.token_ids:
        last = hidden[row.end - 1 : row.end]
        logits = heads.logits(last, of_one(row.adapter, 1)).float()[0]
        score = logits[token_ids[0]]
        for token_id in token_ids[1:]:
            score = score - logits[token_id]
        return activated(score.unsqueeze(0), row.pooling.activation)
    if heads.classifier is None:
        raise ValueError(f"row {row.row} asks for scores, and the model has no head")
    states = hidden[row.begin : row.end if heads.classifier.reads_all else row.begin + 1]
    states = states if heads.norm is None else heads.norm(states)
    return heads.classifier(states, row.pooling.activation)


def pooled(
    states: Tensor, pooling: Pooling, dense: Sequence[Callable[[Tensor], Tensor]] = ()
) -> Tensor:
    """Return the vector of states `[tokens, hidden]`, or the first of its elements.

    Args:
        states: the hidden states of a text, or of its last token.
        pooling: what its client has asked for.
        dense: functions of the pooled vector, in their order.
    """
    if pooling.method == LAST:
        vector = states[-1]
    elif pooling.method == CLS:
        vector = states[0]
    elif pooling.method == MEAN:
        vector = states.double().mean(0).float()
    else:  # Muennighoff 2022, https://arxiv.org/abs/2202.08904: later tokens count more
        places = torch.arange(1, len(states) + 1, device=states.device, dtype=torch.float64)
        vector = (places @ states.double() / places.sum()).float()
    for module in dense:
        vector = module(vector)
    vector = vector[: pooling.dimensions]
    if pooling.normalize:
        vector = vector / vector.norm().clamp(min=MIN_LENGTH)
    return vector.clone()  # the engine may reuse its memory


def token_logprobs(rows: Sequence[PooledRow], hidden: Tensor, logits: LogitsOfRows) -> list[Tensor]:
    """Return the log-probabilities that rows ask for, in the model's own distribution.

    The logits of all rows are computed together, at most MAX_LOGIT_ROWS at one time.
    """
    scored = [_scored_ids(row, hidden.device) for row in rows]
    places = [place for of_row in scored for place in of_row]
    all_ids = [ids for of_row in scored for ids in of_row.values()]
    adapters = np.repeat([row.adapter for row in rows], [len(of_row) for of_row in scored])
    found: list[Tensor] = []
    largest: list[Tensor] = []
    for begin in range(0, len(places), MAX_LOGIT_ROWS):
        piece = torch.tensor(places[begin : begin + MAX_LOGIT_ROWS], device=hidden.device)
        indexes = adapters[begin : begin + MAX_LOGIT_ROWS]
        of_piece = indexes if (indexes != NO_ADAPTER).any() else None
        logprobs = logits(hidden[piece], of_piece).float().log_softmax(-1)
        found += [each[ids] for each, ids in zip(logprobs, all_ids[begin:], strict=False)]
        largest += logprobs.amax(-1, keepdim=True)
    vectors, first = [], 0
    for row, of_row in zip(rows, scored, strict=True):
        own = slice(first, first + len(of_row))
        first += len(of_row)
        vectors.append(torch.cat(found[own] + largest[own] * row.pooling.with_largest))
    return vectors


def _scored_ids(row: PooledRow, device: torch.device) -> dict[int, Tensor]:
    """Return the ids whose probabilities a row asks for, by the place of the token before them."""
    count = row.pooling.num_last
    if not count:
        return {row.end - 1: torch.tensor(row.pooling.token_ids, device=device)}
    ids = row.last_ids.long().unsqueeze(1)
    return dict(zip(range(row.end - 1 - count, row.end - 1), ids, strict=True))


def _fetched(row: int, fetch: Fetch) -> VectorRow:
    return VectorRow(row, np.asarray(fetch(), dtype="<f4").tobytes())


def has_nonfinite(row: VectorRow) -> bool:
    """Return whether a vector has NaN or infinity."""
    return not np.isfinite(np.frombuffer(row.vector, dtype="<f4")).all()
