"""Cut a checkpoint's tensors into the parts of the tensor parallel ranks."""

from dataclasses import dataclass

import torch
from torch import Tensor

from worker_proc.models.base import Model
from worker_proc.models.layers import Linear, Parallel


@dataclass(frozen=True, slots=True)
class TPRank:
    """This process among the `count` processes that share a model."""

    rank: int = 0
    count: int = 1


WHOLE = TPRank()


class WeightSharder:
    """Cuts each tensor as the layer that it fills is split."""

    def __init__(self, model: Model, rank: TPRank) -> None:
        self._rank = rank
        self._layers: dict[int, Linear] = {}
        if rank.count == 1:
            return
        for layer in model.modules():
            if isinstance(layer, Linear) and layer.parallel is not Parallel.NONE:
                self._layers |= {memory_of(values): layer for values in layer.parameters()}

    def shard(self, tensor: Tensor, target: Tensor) -> Tensor:
        """Return the part of a whole tensor that belongs to `target`, a view of a parameter.

        If outputs are summed over the ranks, only rank 0 has the bias; the others have zeros.
        """
        layer = self._layers.get(memory_of(target))
        if layer is None:
            return tensor
        if layer.parallel is Parallel.COLUMN:
            return self._cut(tensor, 0)
        if target.dim() == 2:
            return self._cut(tensor, 1)
        return tensor if self._rank.rank == 0 else torch.zeros_like(tensor)

    def _cut(self, tensor: Tensor, dim: int) -> Tensor:
        if tensor.shape[dim] % self._rank.count:
            return tensor  # its shape is not the model's: the caller's check reports that
        return tensor.chunk(self._rank.count, dim)[self._rank.rank]


def memory_of(tensor: Tensor) -> int:
    """Return the address of the tensor's storage, which all views of a parameter share."""
    return tensor.untyped_storage().data_ptr()
