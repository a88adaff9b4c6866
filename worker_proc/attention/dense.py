"""Attention of one dense, padded problem in torch: the keys and values are gathered already.

Queries are `[rows, queries, heads, head_dim]`, as are results; keys and values are
`[rows, kv_heads, keys, head_dim]`. A mask `[rows, queries, keys]` is true where a query sees a key;
None stands for the diagonal.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from worker_proc.models.layers import Attention
from worker_proc.models.torch_functions import cap

MAX_SCORES = 16 * 1024 * 1024  # query-key pairs of all heads that are materialised


def attend_materialised(
    bias: Tensor, attention: Attention, q: Tensor, k: Tensor, v: Tensor
) -> Tensor:
    """Attend by two matrix products, in which query heads that share a key head are more queries.

    Args:
        bias: The mask as 0 or -inf, for each batched matrix of scores.
        attention: Scale, soft cap and sinks.
        q: `[rows, queries, heads, head_dim]`, as is what is returned.
        k: `[rows, kv_heads, keys, head_dim]`.
        v: As `k`.
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
    """Attend as `attend_materialised` does, to a block of queries at a time."""
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
        parts.append(attend_materialised(bias, attention, q[:, block], k, v))
    return torch.cat(parts, 1)


def score_bias(mask: Tensor, heads: int, kv_heads: int, dtype: torch.dtype) -> Tensor:
    """Return a mask `[rows, queries, keys]` as 0 or -inf for `attend_materialised`."""
    count, queries, keys = mask.shape
    bias = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
    bias.masked_fill_(~mask, float("-inf"))
    bias = bias.view(count, 1, 1, queries, keys).expand(-1, kv_heads, heads // kv_heads, -1, -1)
    return bias.reshape(count * kv_heads, -1, keys)
