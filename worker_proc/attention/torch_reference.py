"""Attention over pages in plain torch: runs on every device, and is what others are tested against.

The rows of a step are cut into groups of similar length; each group becomes one padded, dense
problem. Keys and values of past tokens are gathered from the pages into a buffer that is reused
(fresh memory costs more in page faults than the copy itself). A prompt that has no past needs no
gathering at all. Scores are written out where they are small, as two batched matrix products are
several times as fast on a CPU as fused attention at few queries; where they are large,
`scaled_dot_product_attention` keeps the memory in bounds.
"""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from worker_proc.attention.base import (
    AttentionBackend,
    AttentionShape,
    BatchLayout,
    Ints,
    StepAttention,
)

PADDING_ALLOWANCE = 2048
"""Query-key pairs that a group may waste before the rule below looks at it."""
MAX_GATHERED_BYTES = 4 * 1024 * 1024
"""Keys and values of one group and layer: few enough to stay in the last-level cache."""
MAX_SCORES = 16 * 1024 * 1024
"""Scores (query-key pairs of all heads) that are written out."""


@dataclass(frozen=True, slots=True)
class _Group:
    """Rows first_row..last_row as one dense problem of `rows` x `queries` x `keys`.

    first, last: its tokens in the step. spread: [rows * queries] which of these tokens stands at
    each padded place, None where there is no padding. collect: [tokens] the padded place of each
    token. gather: which page parts to bring together, None for rows without a past. mask:
    [rows, queries, keys] true where a query sees a key; `bias` is the same, 0 or -inf, for each
    batched matrix of scores [rows * kv_heads, group_heads * queries, keys].
    """

    first: int
    last: int
    rows: int
    queries: int
    keys: int
    spread: Tensor | None
    collect: Tensor | None
    gather: Tensor | None
    mask: Tensor | None
    bias: Tensor | None


class TorchAttention(AttentionBackend):
    """Layout of a layer's pages: [pages + 1, 2 (keys, values), kv_heads, page_size, head_dim], so
    that the part of one head in one page is contiguous and is copied as a whole."""

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
        self._layers = [_zeros(size, dtype, device) for _ in range(shape.layers)]
        self._buffer = torch.empty(0, dtype=dtype, device=device)
        whole = shape.head_dim * dtype.itemsize % torch.int64.itemsize == 0
        self._moved_as = torch.int64 if whole else dtype  # indexing goes by element, however large
        heads = torch.arange(2 * shape.kv_heads, device=device)
        self._head_places = heads * page_size
        self._head_parts = heads.view(2, 1, shape.kv_heads, 1)

    def begin_step(self, rows: BatchLayout) -> StepAttention:
        first_tokens = np.concatenate(([0], np.cumsum(rows.num_tokens)))
        groups = [
            self._group(rows, start, stop, first_tokens)
            for start, stop in self._cut(rows.num_tokens, rows.computed)
        ]
        return _TorchStep(self, self._write_places(rows, first_tokens), groups)

    def write(self, layer: int, places: Tensor, kv: Tensor) -> None:
        """kv: [tokens, 2, kv_heads, head_dim] to places [tokens, 2 * kv_heads]."""
        flat = self._layers[layer].view(-1, self.shape.head_dim).view(self._moved_as)
        flat[places] = kv.view(self._moved_as).flatten(1, 2)

    def gather(self, layer: int, group: _Group) -> Tensor:
        """[2, rows, kv_heads, keys, head_dim], valid until the next call."""
        assert group.gather is not None
        part = self.page_size * self.shape.head_dim
        size = group.gather.numel() * part
        if self._buffer.numel() < size:
            self._buffer = torch.empty(size, dtype=self.dtype, device=self.device)
        gathered = self._buffer[:size].view(-1, part)
        torch.index_select(self._layers[layer].view(-1, part), 0, group.gather, out=gathered)
        return gathered.view(2, group.rows, self.shape.kv_heads, group.keys, self.shape.head_dim)

    def _write_places(self, rows: BatchLayout, first_tokens: Ints) -> Tensor:
        """[tokens, 2 * kv_heads]: where a token's keys and values lie in pages of head_dim rows."""
        row_of_token = np.repeat(np.arange(len(rows.slots)), rows.num_tokens)
        ahead = np.arange(first_tokens[-1]) - first_tokens[row_of_token]
        page, offset = np.divmod(rows.computed[row_of_token] + ahead, self.page_size)
        pages = rows.page_table[self._to_device(rows.slots[row_of_token]), self._to_device(page)]
        per_page = 2 * self.shape.kv_heads * self.page_size
        return (pages * per_page + self._to_device(offset)).unsqueeze(1) + self._head_places

    def _cut(self, num_tokens: Ints, computed: Ints) -> list[tuple[int, int]]:
        """Runs of rows that are worth computing together: of one kind, little padding, and no more
        keys than the gathering buffer should hold."""
        bytes_per_key = self.shape.bytes_per_token(self.dtype) // self.shape.layers
        most_keys = MAX_GATHERED_BYTES // bytes_per_key
        kinds = (num_tokens > 1) * 2 + ((num_tokens > 1) & (computed > 0))
        runs: list[tuple[int, int]] = []
        start, queries, keys, needed = 0, 0, 0, 0
        ends = zip(
            kinds.tolist(), num_tokens.tolist(), (computed + num_tokens).tolist(), strict=True
        )
        for row, (kind, n, length) in enumerate(ends):
            new_queries, new_keys, new_needed = (
                max(queries, n),
                max(keys, length),
                needed + n * length,
            )
            count = row - start + 1
            padded = count * new_queries * new_keys
            if row > start and (
                kind != kinds[start]
                or padded > 2 * new_needed + PADDING_ALLOWANCE
                or count * new_keys > most_keys
            ):
                runs.append((start, row))
                start, new_queries, new_keys, new_needed = row, n, length, n * length
            queries, keys, needed = new_queries, new_keys, new_needed
        runs.append((start, len(num_tokens)))
        return runs

    def _group(self, rows: BatchLayout, start: int, stop: int, first_tokens: Ints) -> _Group:
        num_tokens, computed = rows.num_tokens[start:stop], rows.computed[start:stop]
        count, queries = stop - start, int(num_tokens.max())
        has_past = queries == 1 or bool(computed.max() > 0)
        gather, keys = None, queries
        if has_past:
            pages = -(-int((computed + num_tokens).max()) // self.page_size)
            keys = pages * self.page_size
            gather = self._gather_index(rows, start, stop, pages)
        spread, collect = None, None
        if (num_tokens != queries).any():
            inside = np.arange(queries) < num_tokens[:, None]
            collect = self._to_device(np.flatnonzero(inside))
            places = (first_tokens[start:stop] - first_tokens[start])[:, None] + np.arange(queries)
            spread = self._to_device(np.where(inside, places, 0).ravel())
        limits = self._to_device(computed[:, None] + np.arange(queries))
        mask: Tensor | None = torch.arange(keys, device=self.device) <= limits.unsqueeze(-1)
        bias = None
        if count * self.shape.heads * queries * keys <= MAX_SCORES:
            assert mask is not None
            bias = self._bias(mask)
        elif not has_past:
            mask = None
        return _Group(
            first=int(first_tokens[start]),
            last=int(first_tokens[stop]),
            rows=count,
            queries=queries,
            keys=keys,
            spread=spread,
            collect=collect,
            gather=gather,
            mask=mask,
            bias=bias,
        )

    def _gather_index(self, rows: BatchLayout, start: int, stop: int, pages: int) -> Tensor:
        """[2 * rows * kv_heads * pages]: parts of pages, so that each head's keys lie together."""
        table = rows.page_table[:, :pages].index_select(0, self._to_device(rows.slots[start:stop]))
        parts = table.view(1, stop - start, 1, pages) * (2 * self.shape.kv_heads)
        return (parts + self._head_parts).flatten()

    def _bias(self, mask: Tensor) -> Tensor:
        count, queries, keys = mask.shape
        kv_heads, shared = self.shape.kv_heads, self.shape.heads // self.shape.kv_heads
        bias = torch.zeros(mask.shape, dtype=self.dtype, device=self.device)
        bias.masked_fill_(~mask, float("-inf"))
        bias = bias.view(count, 1, 1, queries, keys).expand(-1, kv_heads, shared, -1, -1)
        return bias.reshape(count * kv_heads, shared * queries, keys)

    def _to_device(self, values: Ints) -> Tensor:
        return torch.from_numpy(values).to(self.device)


class _TorchStep(StepAttention):
    def __init__(self, pool: TorchAttention, places: Tensor, groups: list[_Group]) -> None:
        self._pool = pool
        self._places = places
        self._groups = groups

    def attend(self, layer: int, q: Tensor, kv: Tensor) -> Tensor:
        self._pool.write(layer, self._places, kv)
        parts = [self._attend_group(layer, group, q, kv) for group in self._groups]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _attend_group(self, layer: int, group: _Group, q: Tensor, kv: Tensor) -> Tensor:
        """[tokens of the group, heads * head_dim]"""
        shape = self._pool.shape
        q = _pad(group, q[group.first : group.last])
        if group.gather is not None:
            k, v = self._pool.gather(layer, group)
        else:
            fresh = _pad(group, kv[group.first : group.last])
            k, v = fresh.permute(2, 0, 3, 1, 4)
        out = (
            _written_out(group, shape, q, k, v)
            if group.bias is not None
            else _fused(group, q, k, v)
        )
        out = out.reshape(group.rows * group.queries, shape.heads * shape.head_dim)
        return out if group.collect is None else out.index_select(0, group.collect)


def _pad(group: _Group, values: Tensor) -> Tensor:
    """[tokens of the group, ...] to [rows, queries, ...]."""
    if group.spread is not None:
        values = values.index_select(0, group.spread)
    return values.unflatten(0, (group.rows, group.queries))


def _written_out(group: _Group, shape: AttentionShape, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """q: [rows, queries, heads, head_dim]; k, v: [rows, kv_heads, keys, head_dim]; returns as q.

    The query heads that share a key head are more queries of the same matrix product.
    """
    assert group.bias is not None
    shared = shape.heads // shape.kv_heads
    q = q.unflatten(2, (shape.kv_heads, shared)).permute(0, 2, 3, 1, 4)
    q = q.reshape(group.rows * shape.kv_heads, shared * group.queries, shape.head_dim)
    k, v = k.reshape(-1, group.keys, shape.head_dim), v.reshape(-1, group.keys, shape.head_dim)
    scores = torch.baddbmm(group.bias, q, k.transpose(1, 2), alpha=shape.head_dim**-0.5)
    out = torch.bmm(torch.softmax(scores, -1), v)
    out = out.view(group.rows, shape.heads, group.queries, shape.head_dim)
    return out.transpose(1, 2)


def _fused(group: _Group, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The same, with scores in small blocks only."""
    mask = None if group.mask is None else group.mask.unsqueeze(1)
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2),
        k,
        v,
        attn_mask=mask,
        is_causal=mask is None,
        enable_gqa=q.shape[2] != k.shape[1],
    )
    return out.transpose(1, 2)


def _zeros(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """On a CPU through numpy, whose zeros take no memory until they are written to."""
    if device.type != "cpu":
        return torch.zeros(size, dtype=dtype, device=device)
    raw = np.zeros(int(np.prod(size)) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(raw).view(dtype).view(size)
