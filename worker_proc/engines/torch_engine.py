"""The engine in plain torch, for every device; the kernels are tested against it.

Attention of one dense, padded problem; attention over pages, which cuts a step into such problems;
then the engine, and a model's operations in torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quadriga.wire.worker import NO_ADAPTER
from worker_proc.adapters.change import Adapter, LinearChange, no_room_for_adapter
from worker_proc.models.attention import AttentionShape, BatchLayout, Ints
from worker_proc.models.base import Model
from worker_proc.models.layers import (
    Activation,
    Attention,
    Embedding,
    Experts,
    LayerNorm,
    Linear,
    Parallel,
    RMSNorm,
    Rope,
    activate,
    cap,
    gate_up,
    route,
)
from worker_proc.models.ops import Ops
from worker_proc.models.transfer import send
from worker_proc.step.engine import Engine
from worker_proc.step.inputs import StepInputs
from worker_proc.step.pooling import Classifier, OutputNorm
from worker_proc.step.slot_table import ALL_FINITE

if TYPE_CHECKING:
    from worker_proc.distributed.tp_group import TPGroup


# Attention of one dense, padded problem in torch: the keys and values are gathered already.
#
# Queries are `[rows, queries, heads, head_dim]`, as are results; keys and values are `[rows,
# kv_heads, keys, head_dim]`. A mask `[rows, queries, keys]` is true where a query sees a key;
# None stands for the diagonal.

MAX_SCORES = 16 * 1024 * 1024  # query-key pairs of all heads that are materialised


def attend_materialised(
    bias: Tensor, attention: Attention, q: Tensor, k: Tensor, v: Tensor
) -> Tensor:
    """Attend by two matrix products, in which query heads that share a key head are more queries.

    Args:
        bias: the mask as 0 or -inf, for each batched matrix of scores.
        attention: scale, soft cap and sinks.
        q: `[rows, queries, heads, head_dim]`, as is what is returned.
        k: `[rows, kv_heads, keys, head_dim]`.
        v: as `k`.
    """
    rows, queries, heads, head_dim = q.shape
    kv_heads, keys = k.shape[1:3]
    q = q.unflatten(2, (kv_heads, heads // kv_heads)).permute(0, 2, 3, 1, 4)
    q = q.reshape(rows * kv_heads, -1, head_dim)
    k, v = k.reshape(-1, keys, head_dim), v.reshape(-1, keys, head_dim)
    if attention.softcap is None:
        scores = torch.baddbmm(bias, q, k.transpose(1, 2), alpha=attention.scale)
    else:
        scores = cap(torch.bmm(q, k.transpose(1, 2)) * attention.scale, attention.softcap) + bias
    out = torch.bmm(_softmax(scores, attention.sinks, rows, queries), v)
    out = out.view(rows, heads, queries, head_dim)
    return out.transpose(1, 2)


def _softmax(scores: Tensor, sinks: Tensor | None, rows: int, queries: int) -> Tensor:
    """Return the weights of scores `[rows * kv_heads, group heads * queries, keys]`."""
    if sinks is None:
        return torch.softmax(scores, -1)
    sink = sinks.to(scores.dtype).repeat_interleave(queries).repeat(rows)
    scores = torch.cat((scores, sink.view(*scores.shape[:2], 1)), -1)
    return torch.softmax(scores, -1)[..., :-1]


def attend_fused(mask: Tensor | None, scale: float, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend as `attend_materialised` does, with scores in small blocks only."""
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2),
        k,
        v,
        attn_mask=None if mask is None else mask.unsqueeze(1),
        is_causal=mask is None,
        enable_gqa=q.shape[2] != k.shape[1],
        scale=scale,
    )
    return out.transpose(1, 2)


def attend_in_blocks(
    mask: Tensor | None, attention: Attention, q: Tensor, k: Tensor, v: Tensor
) -> Tensor:
    """Attend as `attend_materialised` does, to a block of queries at a time.

    Biases by distance are added here.
    """
    rows, queries, heads, _ = q.shape
    kv_heads, keys = k.shape[1:3]
    if mask is None:
        mask = torch.ones(queries, keys, dtype=torch.bool, device=q.device).tril()
        mask = mask.expand(rows, -1, -1)
    size = max(1, MAX_SCORES // (rows * heads * keys))
    parts = []
    for start in range(0, queries, size):
        block = slice(start, start + size)
        bias = score_bias(mask[:, block], heads, kv_heads, q.dtype)
        if attention.position_bias is not None:
            distances = attention.position_bias.between(queries, keys)[:, block]
            bias = bias + distances_bias(distances, rows, kv_heads, q.dtype)
        parts.append(attend_materialised(bias, attention, q[:, block], k, v))
    return torch.cat(parts, 1)


def score_bias(mask: Tensor, heads: int, kv_heads: int, dtype: torch.dtype) -> Tensor:
    """Return a mask `[rows, queries, keys]` as 0 or -inf for `attend_materialised`."""
    count, queries, keys = mask.shape
    bias = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
    bias.masked_fill_(~mask, float("-inf"))
    bias = bias.view(count, 1, 1, queries, keys).expand(-1, kv_heads, heads // kv_heads, -1, -1)
    return bias.reshape(count * kv_heads, -1, keys)


def distances_bias(biases: Tensor, rows: int, kv_heads: int, dtype: torch.dtype) -> Tensor:
    """Return biases `[heads, queries, keys]` of every row in the form of `score_bias`."""
    one_row = biases.to(dtype).view(kv_heads, -1, biases.shape[2])
    return one_row.repeat(rows, 1, 1)


# Attention over pages in plain torch, on every device: the reference of the other engines' tests.
#
# The rows of a step are cut into groups of similar length; each group becomes one padded, dense
# problem. Keys and values of past tokens are gathered from the pages into a buffer that is reused
# (fresh memory costs more in page faults than the copy itself). A prompt that has no past needs
# no gathering at all. Scores are materialised where they are small, as two batched matrix
# products are several times as fast on a CPU as fused attention at few queries; where they are
# large, `scaled_dot_product_attention` keeps the memory in bounds.

# Query-key pairs that a group may waste on padding, beyond half of its own.
PADDING_ALLOWANCE = 2048
# Keys and values of one group and layer should stay in the last-level cache.
MAX_GATHERED_BYTES = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class _Group:
    """Neighbouring rows as one dense problem of `rows` x `queries` x `keys`.

    Attributes:
        first, last: its tokens in the step, `last` excluded.
        spread: `[rows * queries]` the token at each padded place; None without padding.
        collect: `[tokens]` the padded place of each token; None without padding.
        gather: the parts of pages to gather; None for rows without a past.
        beyond: vectors of the gathered, or else padded, keys and values that lie behind the end of
            their row: what is there may be NaN, and 0 times NaN is NaN. None if there are none.
        mask: `[rows, queries, keys]` true where a query sees a key; None where the diagonal
            decides.
        bias: the mask as 0 or -inf, for each batched matrix of scores
            `[rows * kv_heads, group_heads * queries, keys]`; None if scores are not materialised.
    """

    first: int
    last: int
    rows: int
    queries: int
    keys: int
    spread: Tensor | None
    collect: Tensor | None
    gather: Tensor | None
    beyond: Tensor | None
    mask: Tensor | None
    bias: Tensor | None


class TorchAttention:
    """The pages of all layers.

    A layer is `[pages + 1, 2 (keys, values), kv_heads, page_size, head_dim]`, so that the part of
    one head in one page is contiguous and is copied as a whole.

    Attributes:
        layers: the layers.
    """

    def __init__(
        self,
        shape: AttentionShape,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.shape = shape
        self.page_size = page_size
        self.dtype = dtype
        self.device = device
        size = (num_pages + 1, 2, shape.kv_heads, page_size, shape.head_dim)
        pools = [_zeros(size, dtype, device) for _ in range(shape.num_pools)]
        self.layers = [pools[layer % len(pools)] for layer in range(shape.layers)]
        self._buffer = torch.empty(0, dtype=dtype, device=device)
        whole = shape.head_dim * dtype.itemsize % torch.int64.itemsize == 0
        self._copy_dtype = torch.int64 if whole else dtype  # large elements are indexed faster
        heads = torch.arange(2 * shape.kv_heads, device=device)
        self._head_places = heads * page_size
        self._head_parts = heads.view(2, 1, shape.kv_heads, 1)

    def begin_step(self, layout: BatchLayout) -> "TorchStepAttention":
        """Compute the indexes and masks of a step, once for all layers."""
        first_tokens = np.concatenate(([0], np.cumsum(layout.num_tokens)))
        places = self._write_places(layout, first_tokens)
        return TorchStepAttention(self, layout, first_tokens, places)

    def groups(self, layout: BatchLayout, first_tokens: Ints, window: int | None) -> "list[_Group]":
        """Cut a step into dense problems for the layers with this window."""
        first_pages = self._first_pages(layout.num_computed, window)
        past = layout.num_computed - first_pages * self.page_size
        return [
            self._group(layout, start, stop, first_tokens, first_pages, window)
            for start, stop in self._cut(layout.num_tokens, past)
        ]

    def _first_pages(self, num_computed: Ints, window: int | None) -> Ints:
        """Return the number of pages that a row's first query and those after it do not see."""
        if window is None:
            return np.zeros_like(num_computed)
        return np.maximum(num_computed + 1 - window, 0) // self.page_size

    def write(self, layer: int, places: Tensor, kv: Tensor) -> None:
        """Write `[tokens, 2, kv_heads, head_dim]` to places `[tokens, 2 * kv_heads]`."""
        flat = self.layers[layer].view(-1, self.shape.head_dim).view(self._copy_dtype)
        flat[places] = kv.view(self._copy_dtype).flatten(1, 2)

    def gather(self, layer: int, group: _Group) -> Tensor:
        """Gather `[2, rows, kv_heads, keys, head_dim]` of a group, valid until the next call."""
        assert group.gather is not None
        part = self.page_size * self.shape.head_dim
        size = group.gather.numel() * part
        if self._buffer.numel() < size:
            self._buffer = torch.empty(size, dtype=self.dtype, device=self.device)
        gathered = self._buffer[:size].view(-1, part)
        torch.index_select(self.layers[layer].view(-1, part), 0, group.gather, out=gathered)
        if group.beyond is not None:
            gathered.view(-1, self.shape.head_dim).index_fill_(0, group.beyond, 0)
        return gathered.view(2, group.rows, self.shape.kv_heads, group.keys, self.shape.head_dim)

    def _write_places(self, layout: BatchLayout, first_tokens: Ints) -> Tensor:
        """Return where each token's keys and values go: `[tokens, 2 * kv_heads]`, in head_dim."""
        row_of_token = np.repeat(np.arange(len(layout.slots)), layout.num_tokens)
        offset_in_row = np.arange(first_tokens[-1]) - first_tokens[row_of_token]
        positions = layout.num_computed[row_of_token] + offset_in_row
        page, offset = np.divmod(positions, self.page_size)
        slots = send(layout.slots[row_of_token], self.device)
        pages = layout.page_table[slots, send(page, self.device)]
        per_page = 2 * self.shape.kv_heads * self.page_size
        return (pages * per_page + send(offset, self.device)).unsqueeze(1) + self._head_places

    def _cut(self, num_tokens: Ints, num_computed: Ints) -> list[tuple[int, int]]:
        """Cut the rows into runs [start, stop) that are worth computing together.

        The rows of a run are of one kind, with little padding, and their keys fit the buffer.
        `num_computed` counts the keys in pages that are gathered.
        """
        bytes_per_key = self.shape.bytes_per_token(self.dtype) // self.shape.num_pools
        max_keys = MAX_GATHERED_BYTES // bytes_per_key
        kinds = (num_tokens > 1) * 2 + ((num_tokens > 1) & (num_computed > 0))
        runs: list[tuple[int, int]] = []
        start, queries, keys, needed = 0, 0, 0, 0
        rows = zip(
            kinds.tolist(), num_tokens.tolist(), (num_computed + num_tokens).tolist(), strict=True
        )
        for row, (kind, n, length) in enumerate(rows):
            new_queries, new_keys = max(queries, n), max(keys, length)
            new_needed = needed + n * length
            count = row - start + 1
            padded = count * new_queries * new_keys
            if row > start and (
                kind != kinds[start]
                or padded > 2 * new_needed + PADDING_ALLOWANCE
                or count * new_keys > max_keys
            ):
                runs.append((start, row))
                start, new_queries, new_keys, new_needed = row, n, length, n * length
            queries, keys, needed = new_queries, new_keys, new_needed
        runs.append((start, len(num_tokens)))
        return runs

    def _group(
        self,
        layout: BatchLayout,
        start: int,
        stop: int,
        first_tokens: Ints,
        first_pages: Ints,
        window: int | None,
    ) -> _Group:
        num_tokens, num_computed = layout.num_tokens[start:stop], layout.num_computed[start:stop]
        count, queries = stop - start, int(num_tokens.max())
        has_past = queries == 1 or bool(num_computed.max() > 0)
        gather, keys = None, queries
        first_keys = np.zeros_like(num_computed)
        if has_past:
            first_keys = first_pages[start:stop] * self.page_size
            num_pages = -(-int((num_computed + num_tokens - first_keys).max()) // self.page_size)
            keys = num_pages * self.page_size
            gather = self._gather_index(layout, start, stop, first_pages, num_pages)
        spread, collect, beyond = None, None, None
        if gather is not None:
            beyond = self._places_beyond(num_computed + num_tokens - first_keys, keys)
        if (num_tokens != queries).any():
            inside = np.arange(queries) < num_tokens[:, None]
            collect = send(np.flatnonzero(inside), self.device)
            if gather is None:
                beyond = send(np.flatnonzero(~inside), self.device)
            places = (first_tokens[start:stop] - first_tokens[start])[:, None] + np.arange(queries)
            spread = send(np.where(inside, places, 0).ravel(), self.device)
        limits = (num_computed - first_keys)[:, None] + np.arange(queries)
        own = send(limits, self.device).unsqueeze(-1)
        key = torch.arange(keys, device=self.device)
        if self.shape.bidirectional:
            mask = (key < send(num_tokens, self.device).view(-1, 1, 1)).expand(-1, queries, -1)
            mask = mask if window is None else mask & (key < own + window)
        else:
            mask = key <= own
        if window is not None:
            mask = mask & (key > own - window)
        materialised = count * self.shape.heads * queries * keys <= MAX_SCORES
        is_causal = not has_past and (window is None or window >= queries)
        is_causal &= not self.shape.bidirectional
        return _Group(
            first=int(first_tokens[start]),
            last=int(first_tokens[stop]),
            rows=count,
            queries=queries,
            keys=keys,
            spread=spread,
            collect=collect,
            gather=gather,
            beyond=beyond,
            mask=None if is_causal and not materialised else mask,
            bias=score_bias(mask, self.shape.heads, self.shape.kv_heads, self.dtype)
            if materialised
            else None,
        )

    def _places_beyond(self, num_keys: Ints, keys: int) -> Tensor | None:
        """Return which gathered vectors `[2, rows, kv_heads, keys]` lie behind their row's end."""
        row, key = np.nonzero(np.arange(keys) >= num_keys[:, None])
        if not len(row):
            return None
        heads = np.arange(self.shape.kv_heads)
        one = (row[:, None] * len(heads) + heads) * keys + key[:, None]
        both = np.stack((one, one + len(num_keys) * len(heads) * keys))
        return send(both.ravel(), self.device)

    def _gather_index(
        self, layout: BatchLayout, start: int, stop: int, first_pages: Ints, num_pages: int
    ) -> Tensor:
        """Return the parts of pages `[2 * rows * kv_heads * pages]`, each head's keys together."""
        slots = send(layout.slots[start:stop], self.device)
        places = first_pages[start:stop, None] + np.arange(num_pages)
        places = np.minimum(places, layout.page_table.shape[1] - 1)
        table = layout.page_table[slots.unsqueeze(1), send(places, self.device)]
        parts = table.view(1, stop - start, 1, num_pages) * (2 * self.shape.kv_heads)
        return (parts + self._head_parts).flatten()


class TorchStepAttention:
    """Attention of one step."""

    def __init__(
        self, pool: TorchAttention, layout: BatchLayout, first_tokens: Ints, places: Tensor
    ) -> None:
        self._pool = pool
        self._layout = layout
        self._first_tokens = first_tokens
        self._places = places
        self._largest: list[Tensor] = []  # of each layer: [tokens] the largest key or value
        self._groups: dict[int | None, list[_Group]] = {}
        self._biases: dict[tuple[int, int | None], Tensor] = {}  # first token and window of a group

    def attend(self, layer: int, q: Tensor, kv: Tensor, attention: Attention) -> Tensor:
        """Write all the step's keys and values of a layer into the pages, then attend.

        Args:
            layer: number of the layer.
            q: `[tokens, heads, head_dim]`, rotated; may be strided in all but its last dimension.
            kv: `[tokens, 2, kv_heads, head_dim]`, keys (rotated), then values; strided as `q`.
            attention: scale, soft cap, window and sinks of the layer.

        Returns:
            `[tokens, heads * head_dim]`.
        """
        self._pool.write(layer, self._places, kv)
        self._largest.append(torch.linalg.vector_norm(kv, torch.inf, (1, 2, 3)))
        window = attention.window
        if (groups := self._groups.get(window)) is None:
            groups = self._pool.groups(self._layout, self._first_tokens, window)
            self._groups[window] = groups
        parts = [self._attend_group(layer, group, q, kv, attention) for group in groups]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def note_nonfinite(self, inputs: StepInputs) -> None:
        """Note in the slot table which keys and values of all layers are not finite."""
        slots = send(inputs.token_slots, self._pool.device)
        is_finite = torch.stack(self._largest).amax(0).isfinite()
        positions = inputs.positions.masked_fill(is_finite, ALL_FINITE)
        inputs.table.nonfinite_from.scatter_reduce_(0, slots, positions, "amin")

    def _attend_group(
        self, layer: int, group: _Group, q: Tensor, kv: Tensor, attention: Attention
    ) -> Tensor:
        """Return `[tokens of the group, heads * head_dim]`."""
        shape = self._pool.shape
        q = _pad(group, q[group.first : group.last])
        if group.gather is not None:
            k, v = self._pool.gather(layer, group)
        else:
            fresh = _pad(group, kv[group.first : group.last])
            if group.beyond is not None:
                fresh.flatten(0, 1).index_fill_(0, group.beyond, 0)
            k, v = fresh.permute(2, 0, 3, 1, 4)
        no_extras = attention.softcap is None and attention.sinks is None
        if group.bias is not None:
            out = attend_materialised(self._bias(group, attention), attention, q, k, v)
        elif no_extras and attention.position_bias is None:
            out = attend_fused(group.mask, attention.scale, q, k, v)
        else:
            out = attend_in_blocks(group.mask, attention, q, k, v)
        out = out.reshape(group.rows * group.queries, shape.heads * shape.head_dim)
        return out if group.collect is None else out.index_select(0, group.collect)

    def _bias(self, group: _Group, attention: Attention) -> Tensor:
        """Return the mask of a group with the biases by distance, computed once for all layers."""
        assert group.bias is not None
        position_bias, shape = attention.position_bias, self._pool.shape
        if position_bias is None:
            return group.bias
        key = (group.first, attention.window)
        if (bias := self._biases.get(key)) is None:
            distances = position_bias.between(group.queries, group.keys)
            dtype = group.bias.dtype
            bias = group.bias + distances_bias(distances, group.rows, shape.kv_heads, dtype)
            self._biases[key] = bias
        return bias


def _pad(group: _Group, values: Tensor) -> Tensor:
    """Pad `[tokens of the group, ...]` to `[rows, queries, ...]`."""
    if group.spread is not None:
        values = values.index_select(0, group.spread)
    padded: Tensor = values.unflatten(0, (group.rows, group.queries))
    return padded


def _zeros(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros; on a CPU those of numpy, which take no memory until they are written to."""
    if device.type != "cpu":
        return torch.zeros(size, dtype=dtype, device=device)
    raw = np.zeros(int(np.prod(size)) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(raw).view(dtype).view(size)


# oneDNN packs weights for a number of rows; its layout is the same for 1 to 256.
PACKED_FOR_ROWS = 32

Packed = dict[nn.Module, Tensor]


class AdaptedRows(NamedTuple):
    """Rows of a value that have one adapter.

    Attributes:
        changes: of the adapter, by the matrix.
        embedding: [vocab_size, hidden_size], or None.
        rows: their numbers, in order.
    """

    changes: dict[nn.Module, LinearChange]
    embedding: Tensor | None
    rows: Tensor


class TorchAdapters:
    """The adapters of a model, which its operations add to its products."""

    def __init__(self, model: Model, device: torch.device) -> None:
        self._matrices, self._device = model.matrices(), device
        self._adapters: dict[int, tuple[dict[nn.Module, LinearChange], Tensor | None]] = {}

    def on_device(self, adapter: Adapter) -> Adapter:
        """Return an adapter on the model's device. Raise ModelError if there is no memory for it.

        On a CPU it is the adapter itself.
        """
        try:
            return adapter.to(self._device)
        except torch.OutOfMemoryError as error:
            raise no_room_for_adapter(adapter.num_bytes, self._device) from error

    def set_adapter(self, index: int, adapter: Adapter | None) -> None:
        """Let an index have an adapter, or none."""
        self._adapters.pop(index, None)
        if adapter is not None:
            adapter = self.on_device(adapter)
            changes: dict[nn.Module, LinearChange] = {
                self._matrices[number]: change for number, change in adapter.changes.items()
            }
            self._adapters[index] = changes, adapter.embedding

    def of_rows(self, adapters: Ints | None) -> list[AdaptedRows]:
        """Return the rows of each adapter.

        Args:
            adapters: `[rows]` the index of each row's adapter; None: no row has one.

        Raises:
            ValueError: an index has no adapter.
        """
        found: list[AdaptedRows] = []
        for index in [] if adapters is None else np.unique(adapters).tolist():
            if index == NO_ADAPTER:
                continue
            if index not in self._adapters:
                raise ValueError(f"a row has the adapter {index}, which is not loaded")
            rows = send((adapters == index).nonzero()[0], self._device)
            found.append(AdaptedRows(*self._adapters[index], rows))
        return found


class TorchEngine(Engine):
    """A model in plain torch.

    On a CPU that multiplies bfloat16, weights are laid out as oneDNN prefers, which is nearly
    twice as fast at few rows.
    """

    name = "torch"
    supports_adapters = True

    def __init__(
        self, model: Model, attention: TorchAttention, ranks: "TPGroup | None" = None
    ) -> None:
        """Take a model whose other parts `ranks` have, if there are several."""
        self.model = model
        self.ranks = ranks
        self.output_norm, self.has_head = OutputNorm.of(model), model.has_head
        self.classifier = Classifier.of(model)
        self._attention = attention
        self._adapters = TorchAdapters(model, next(model.parameters()).device)
        self._packed: Packed = {
            module: packed
            for module in model.modules()
            if isinstance(module, Linear | Embedding) and (packed := _pack(module)) is not None
        }

    def forward(self, inputs: StepInputs) -> Tensor:
        adapted = self._adapters.of_rows(inputs.token_adapters)
        ops = TorchOps(self._packed, inputs, self._attention, self.ranks, adapted)
        hidden = self.model.forward(ops)
        ops.note_nonfinite(inputs)
        return hidden

    def kv_parts(self) -> Sequence[Tensor]:
        return self._attention.layers

    def logits(self, hidden: Tensor, adapters: Ints | None = None) -> Tensor:
        adapted = self._adapters.of_rows(adapters)
        return self.model.compute_logits(TorchOps(self._packed, adapted=adapted), hidden)

    def upload_adapter(self, packed: Adapter) -> Adapter:
        return self._adapters.on_device(packed)

    def set_adapter(self, index: int, adapter: Adapter | None) -> None:
        self._adapters.set_adapter(index, adapter)


class TorchOps(Ops[Tensor]):
    """A model's operations in plain torch.

    Without `inputs` only those that need no tokens, positions or pages.
    """

    def __init__(
        self,
        packed: Packed,
        inputs: StepInputs | None = None,
        attention: TorchAttention | None = None,
        ranks: "TPGroup | None" = None,
        adapted: Sequence[AdaptedRows] = (),
    ) -> None:
        self._packed = packed
        self._adapted = adapted
        self._inputs = inputs
        if inputs is not None and attention is not None:
            self._heads = attention.shape
            self._attention = attention.begin_step(inputs.layout)
        self._ranks = ranks
        self._angles: dict[Rope, tuple[Tensor, Tensor]] = {}

    def note_nonfinite(self, inputs: StepInputs) -> None:
        """Note in the slot table which keys and values of the step are not finite."""
        self._attention.note_nonfinite(inputs)

    def embed(
        self,
        tokens: Embedding,
        positions: Embedding | None = None,
        scale: float = 1.0,
        second_type: Tensor | None = None,
    ) -> Tensor:
        assert self._inputs is not None
        x = F.embedding(self._inputs.token_ids, tokens.weight)
        for _, table, rows in self._adapted:
            if table is not None:
                differences = F.embedding(self._inputs.token_ids[rows], table)
                x[rows] = (x[rows].float() + differences).to(x.dtype)
        if scale != 1.0:
            x = x * scale
        if positions is not None:
            x = x + F.embedding(self._inputs.positions + positions.first_row, positions.weight)
        if second_type is not None and (is_second := self._inputs.is_second) is not None:
            x = torch.where(is_second.unsqueeze(1), x + second_type.to(x.dtype), x)
        return x

    def norm(self, norm: LayerNorm | RMSNorm, x: Tensor) -> Tensor:
        if isinstance(norm, LayerNorm):
            return F.layer_norm(x, norm.weight.shape, norm.weight, norm.bias, norm.epsilon)
        gain = norm.gain
        return F.rms_norm(x.to(gain.dtype), gain.shape, gain, norm.epsilon).to(x.dtype)

    def norm_residual(self, norm: LayerNorm | RMSNorm, residual: Tensor) -> Tensor:
        return self.norm(norm, residual)

    def norm_add(self, residual: Tensor, norm: RMSNorm, x: Tensor) -> Tensor:
        return residual + self.norm(norm, x)

    def linear(self, proj: Linear, x: Tensor) -> Tensor:
        projected = self._adapt(proj, x, self._project(proj, proj.bias, x))
        if self._ranks is not None and proj.parallel is Parallel.ROW:
            projected = self._ranks.all_reduce(projected)
        return projected

    def linear_activation(self, proj: Linear, x: Tensor, activation: Activation) -> Tensor:
        return activate(activation, self.linear(proj, x))

    def linear_gated(self, proj: Linear, x: Tensor, activation: Activation) -> Tensor:
        return gate_up(activation, self.linear(proj, x))

    def linear_add(self, residual: Tensor, proj: Linear, x: Tensor, scale: float = 1.0) -> Tensor:
        added = self.linear(proj, x)
        return residual + (added if scale == 1.0 else added * scale)

    def experts_add(
        self, residual: Tensor, experts: Experts, x: Tensor, scale: float = 1.0
    ) -> Tensor:
        weights, chosen = route(experts, self.linear(experts.router, x))
        added = torch.zeros_like(x)
        for number in chosen.unique().tolist():
            tokens, place = (chosen == number).nonzero(as_tuple=True)
            inner = gate_up(
                experts.activation,
                self._of_expert(cast(Linear, experts.gate_up[number]), x[tokens], tokens),
            )
            output = self._of_expert(cast(Linear, experts.down[number]), inner, tokens)
            output = output * weights[tokens, place, None].to(output.dtype)
            added.index_add_(0, tokens, output)
        if self._ranks is not None:
            added = self._ranks.all_reduce(added)
        return residual + (added if scale == 1.0 else added * scale)

    def attend(self, layer: int, qkv: Tensor, attention: Attention) -> Tensor:
        heads, kv_heads = self._heads.heads, self._heads.kv_heads
        qkv = qkv.view(len(qkv), heads + 2 * kv_heads, self._heads.head_dim)
        queries, keys = qkv[:, :heads], qkv[:, heads : heads + kv_heads]
        if (norms := attention.norms) is not None:
            for norm, part in ((norms.queries, queries), (norms.keys, keys)):
                part.copy_(self._norm_heads(norm, part, norms.whole))
        if attention.rope is not None:
            self._rotate(qkv[:, : heads + kv_heads], attention.rope)
        kv = qkv[:, heads:].unflatten(1, (2, kv_heads))
        return self._attention.attend(layer, queries, kv, attention)

    def logits(
        self,
        head: Linear | Embedding,
        x: Tensor,
        scale: float = 1.0,
        softcap: float | None = None,
    ) -> Tensor:
        bias = None if isinstance(head, Embedding) else head.bias
        logits = self._adapt(head, x, self._project(head, bias, x))
        return cap(logits if scale == 1.0 else logits * scale, softcap)

    def _norm_heads(self, norm: RMSNorm, x: Tensor, whole: bool) -> Tensor:
        """Normalize `[tokens, heads, head_dim]`, each head or, if `whole`, each token."""
        return self.norm(norm, x.flatten(1)).view_as(x) if whole else self.norm(norm, x)

    def _project(self, weights: Linear | Embedding, bias: Tensor | None, x: Tensor) -> Tensor:
        packed = self._packed.get(weights)
        if packed is None:
            return F.linear(x, weights.weight, bias)
        return multiply_packed(packed, bias, x)

    def _of_expert(self, proj: Linear, x: Tensor, tokens: Tensor) -> Tensor:
        """Return x Wᵀ + b of some of the step's tokens."""
        return self._adapt(proj, x, self._project(proj, proj.bias, x), tokens)

    def _adapt(
        self, matrix: Linear | Embedding, x: Tensor, projected: Tensor, tokens: Tensor | None = None
    ) -> Tensor:
        """Change the rows of x Wᵀ + b that have an adapter, in place.

        Args:
            matrix: W and b.
            x: [rows, inputs].
            projected: [rows, outputs].
            tokens: the numbers of the rows among the tokens; None: they are all.
        """
        for changes, _, rows in self._adapted:
            if (change := changes.get(matrix)) is None:
                continue
            if tokens is not None:
                rows = torch.isin(tokens, rows).nonzero()[:, 0]
            projected[rows] = self._changed(matrix, change, x[rows], projected[rows])
        return projected

    def _changed(
        self, matrix: Linear | Embedding, change: LinearChange, x: Tensor, projected: Tensor
    ) -> Tensor:
        """Return gain ∘ (W x + U (D x)) + b + shift of rows with the same adapter.

        The sums are in float32.
        """
        bias = None if change.gain is None or isinstance(matrix, Embedding) else matrix.bias
        sums = (projected if bias is None else self._project(matrix, None, x)).float()
        thin = x.float() if change.down is None else F.linear(x.float(), change.down)
        for part in change.parts:
            inner = thin if change.down is None else thin[:, part.ranks]
            sums[:, part.rows] += F.linear(inner, part.up)
        if change.gain is not None:
            sums *= change.gain
        if bias is not None:
            sums += bias.float()
        if change.shift is not None:
            sums += change.shift
        return sums.to(projected.dtype)

    def _rotate(self, x: Tensor, rope: Rope) -> None:
        """Rotate `[tokens, heads, head_dim]` by the tokens' positions, in place."""
        rotated = x[..., : 2 * rope.cosines.shape[1]]
        cosines, sines = self._angles_of(rope, x.dtype)
        swapped = torch.roll(rotated, rope.cosines.shape[1], -1)
        rotated.mul_(cosines).addcmul_(swapped, sines)

    def _angles_of(self, rope: Rope, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cosines and signed sines `[tokens, 1, rotated channels]` of a rope."""
        if (angles := self._angles.get(rope)) is None:
            assert self._inputs is not None
            cosines = rope.cosines.index_select(0, self._inputs.positions).unsqueeze(1)
            sines = rope.sines.index_select(0, self._inputs.positions).unsqueeze(1)
            angles = self._angles[rope] = (
                torch.cat((cosines, cosines), -1).to(dtype),
                torch.cat((-sines, sines), -1).to(dtype),
            )
        return angles


def _pack(module: Linear | Embedding) -> Tensor | None:
    """Return a bfloat16 weight on a CPU in oneDNN's layout; None for any other weight.

    The weight of a linear is replaced by it. That of an embedding stays, as it is looked up, too.
    """
    packed = pack_weight(module.weight)
    if packed is not None and isinstance(module, Linear):
        del module.weight
    return packed


def pack_weight(weight: Tensor) -> Tensor | None:
    """Return a bfloat16 weight `[outputs, inputs]` on a CPU in oneDNN's layout; None for others."""
    if (
        weight.device.type != "cpu"
        or weight.dtype != torch.bfloat16
        or not torch.backends.mkldnn.is_available()
        or not torch.ops.mkldnn._is_mkldnn_bf16_supported()
    ):
        return None
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), PACKED_FOR_ROWS)
    return packed


def multiply_packed(packed: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
    """Return x Wᵀ + b with a packed weight."""
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return product
