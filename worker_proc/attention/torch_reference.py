"""Attention over pages in plain torch, on every device: the reference of the other engines' tests.

The rows of a step are cut into groups of similar length; each group becomes one padded, dense
problem. Keys and values of past tokens are gathered from the pages into a buffer that is reused
(fresh memory costs more in page faults than the copy itself). A prompt that has no past needs no
gathering at all. Scores are materialised where they are small, as two batched matrix products are
several times as fast on a CPU as fused attention at few queries; where they are large,
`scaled_dot_product_attention` keeps the memory in bounds.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from worker_proc.attention import dense
from worker_proc.attention.base import AttentionShape, BatchLayout, Ints
from worker_proc.models.layers import Attention
from worker_proc.step.inputs import StepInputs
from worker_proc.step.slot_table import ALL_FINITE
from worker_proc.system.transfer import send

# A group may waste half of its query-key pairs on padding, and so many more.
PADDING_ALLOWANCE = 2048
# Keys and values of one group and layer should stay in the last-level cache.
MAX_GATHERED_BYTES = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class _Group:
    """Neighbouring rows as one dense problem of `rows` x `queries` x `keys`.

    Attributes:
        first, last: Its tokens in the step, `last` excluded.
        spread: `[rows * queries]` the token at each padded place; None without padding.
        collect: `[tokens]` the padded place of each token; None without padding.
        gather: The parts of pages to gather; None for rows without a past.
        beyond: Vectors of the gathered, or else padded, keys and values that lie behind the end of
            their row: what is there may be NaN, and 0 times NaN is NaN. None if there are none.
        mask: `[rows, queries, keys]` true where a query sees a key; None where the diagonal
            decides.
        bias: The mask as 0 or -inf, for each batched matrix of scores
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
        layers: The layers.
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
        self.layers = [_zeros(size, dtype, device) for _ in range(shape.layers)]
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
        bytes_per_key = self.shape.bytes_per_token(self.dtype) // self.shape.layers
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
        last = send(limits, self.device).unsqueeze(-1)
        key = torch.arange(keys, device=self.device)
        mask = key <= last
        if window is not None:
            mask &= key > last - window
        materialised = count * self.shape.heads * queries * keys <= dense.MAX_SCORES
        is_causal = not has_past and (window is None or window >= queries)
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
            bias=dense.score_bias(mask, self.shape.heads, self.shape.kv_heads, self.dtype)
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

    def attend(self, layer: int, q: Tensor, kv: Tensor, attention: Attention) -> Tensor:
        """Write all the step's keys and values of a layer into the pages, then attend.

        Args:
            layer: Number of the layer.
            q: `[tokens, heads, head_dim]`, rotated; may be strided in all but its last dimension.
            kv: `[tokens, 2, kv_heads, head_dim]`, keys (rotated), then values; strided as `q`.
            attention: Scale, soft cap, window and sinks of the layer.

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
        if group.bias is not None:
            out = dense.attend_materialised(group.bias, attention, q, k, v)
        elif attention.softcap is None and attention.sinks is None:
            out = dense.attend_fused(group.mask, attention.scale, q, k, v)
        else:
            out = dense.attend_in_blocks(group.mask, attention, q, k, v)
        out = out.reshape(group.rows * group.queries, shape.heads * shape.head_dim)
        return out if group.collect is None else out.index_select(0, group.collect)


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
