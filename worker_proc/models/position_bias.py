"""Biases of scores by the distance of two tokens, in buckets that widen with it.

Raffel et al. 2020, https://arxiv.org/abs/1910.10683, section 2.1.
"""

import math

import torch
from torch import Tensor

MAX_DISTANCE = 128  # in tokens, from which on all distances share a bucket


class PositionBias:
    """What is added to the scores of each head, by how far a key is from its query.

    Attributes:
        values: [num_heads, 2 * context_length - 1] float32; the query's own token has the column
            context_length - 1, and the token after it the next one.
    """

    def __init__(self, weights: Tensor, context_length: int) -> None:
        """Spread the biases of buckets `weights` [num_buckets, num_heads] over the distances."""
        distances = torch.arange(1 - context_length, context_length)
        buckets = bucket_of(distances, len(weights)).to(weights.device)
        self.values = weights.float()[buckets].t().contiguous()

    @property
    def own_column(self) -> int:
        """The column of the query's own token."""
        return self.values.shape[1] // 2

    def between(self, queries: int, keys: int) -> Tensor:
        """Return the biases [num_heads, queries, keys] of the first tokens of a text.

        Keys behind the context, which no query sees, have those of its last token.
        """
        device = self.values.device
        key = torch.arange(keys, device=device) + self.own_column
        columns = key - torch.arange(queries, device=device).unsqueeze(1)
        return self.values[:, columns.clamp(max=self.values.shape[1] - 1)]


def bucket_of(distances: Tensor, num_buckets: int) -> Tensor:
    """Return the bucket of each distance, in tokens: a key's position less that of its query.

    Keys before and after the query have half of the buckets each: half of these for one distance
    each, the others for ranges that grow logarithmically.
    """
    half = num_buckets // 2
    exact = half // 2
    length = distances.abs()
    # As in training, in float32: a distance near the border of a bucket depends on it.
    growth = torch.log(length.clamp(min=1).float() / exact) / math.log(MAX_DISTANCE / exact)
    wide = (exact + (growth * (half - exact)).long()).clamp(max=half - 1)
    return half * (distances > 0).long() + torch.where(length < exact, length, wide)
