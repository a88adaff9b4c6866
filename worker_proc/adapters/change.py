"""What an adapter changes: low-rank products that are added to those of a model's matrices.

A changed matrix gives y = gain ∘ (W x + U (D x)) + bias + shift instead of W x + bias (LoRA: Hu et
al. 2021, https://arxiv.org/abs/2106.09685; the gain is DoRA's: Liu et al. 2024,
https://arxiv.org/abs/2402.09353). D x has the rank of the adapter, which is small.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from quadriga.errors import ModelError


@dataclass(frozen=True, slots=True)
class Part:
    """The change of some rows of a matrix, such as those of the queries in a fused projection.

    Attributes:
        first: the first row of the matrix.
        up: U [rows, rank] float32, times the scaling.
        rank_begin: the first row of `LinearChange.down` that `up` is multiplied by.
    """

    first: int
    up: Tensor
    rank_begin: int = 0

    @property
    def rows(self) -> slice:
        """The rows of the matrix."""
        return slice(self.first, self.first + len(self.up))

    @property
    def ranks(self) -> slice:
        """The rows of `LinearChange.down`."""
        return slice(self.rank_begin, self.rank_begin + self.up.shape[1])


@dataclass(frozen=True, slots=True)
class LinearChange:
    """The change of a matrix, or of the part of it that this rank has.

    Attributes:
        down: D [sum of the ranks, inputs] float32; None: the identity, so that `up` has the
            differences of the weights.
        parts: the changed rows; no row is in two of them.
        gain: [outputs] float32; None: 1.
        shift: [outputs] float32; None: 0.
    """

    down: Tensor | None
    parts: tuple[Part, ...]
    gain: Tensor | None = None
    shift: Tensor | None = None

    def tensors(self) -> Iterator[Tensor]:
        """Yield all tensors."""
        yield from (part.up for part in self.parts)
        yield from (t for t in (self.down, self.gain, self.shift) if t is not None)

    def with_outputs(self, order: Tensor) -> "LinearChange":
        """Return the change of the matrix with its rows in an order `[outputs]`."""
        up = torch.zeros(len(order), max((part.ranks.stop for part in self.parts), default=0))
        for part in self.parts:
            up[part.rows, part.ranks] = part.up
        parts = (Part(0, up[order]),) if self.parts else ()
        gain, shift = (None if v is None else v[order] for v in (self.gain, self.shift))
        return LinearChange(self.down, parts, gain, shift)

    def with_inputs(self, order: Tensor) -> "LinearChange":
        """Return the change of the matrix with its columns in an order `[inputs]`."""
        if self.down is not None:
            return replace(self, down=self.down[:, order])
        return replace(self, parts=tuple(replace(p, up=p.up[:, order]) for p in self.parts))

    def to(self, device: torch.device) -> "LinearChange":
        """Return the change on a device."""
        return LinearChange(
            _moved(self.down, device),
            tuple(replace(part, up=part.up.to(device)) for part in self.parts),
            _moved(self.gain, device),
            _moved(self.shift, device),
        )


@dataclass(frozen=True, slots=True)
class Adapter:
    """All changes of an adapter, for one model.

    Attributes:
        changes: by the matrix's number in `Model.matrices`. That of an `Embedding` is the change
            of the logits, of a model whose embedding is its head.
        embedding: [vocab_size, hidden_size] float32, which is added to the table of embeddings
            before their scale; None: nothing is.
    """

    changes: Mapping[int, LinearChange]
    embedding: Tensor | None = None

    def to(self, device: torch.device) -> "Adapter":
        """Return the adapter on a device."""
        changes = {number: change.to(device) for number, change in self.changes.items()}
        return Adapter(changes, _moved(self.embedding, device))

    def tensors(self) -> Iterator[Tensor]:
        """Yield all tensors."""
        for change in self.changes.values():
            yield from change.tensors()
        if self.embedding is not None:
            yield self.embedding

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors in float32."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors())


def no_room_for_adapter(num_bytes: int, device: torch.device) -> ModelError:
    """Return the error where a device has not so much memory left."""
    return ModelError(
        f"the adapter takes {num_bytes / 2**20:.0f} MiB, more than is free on {device}: start with"
        " a lower --mem-fraction-static, or fewer --max-loras"
    )


class AdapterLimits(NamedTuple):
    """What adapters an engine has to take.

    Attributes:
        max_adapters: their number at a time.
        max_rank: of one product.
    """

    max_adapters: int
    max_rank: int


def _moved(tensor: Tensor | None, device: torch.device) -> Tensor | None:
    return None if tensor is None else tensor.to(device)
