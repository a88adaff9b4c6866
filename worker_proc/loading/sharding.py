"""Which part of a checkpoint's tensor a rank has."""

from dataclasses import dataclass

from torch import Tensor

from worker_proc.models.base import Model
from worker_proc.models.layers import Linear, Parallel


@dataclass(frozen=True, slots=True)
class TPRank:
    """Which part of a model is here, of how many."""

    rank: int = 0
    count: int = 1


WHOLE = TPRank()


class WeightSharder:
    """Finds the layer of a parameter, and cuts by what its layer says."""

    def __init__(self, model: Model, part: TPRank) -> None:
        self._part = part
        self._weights: dict[int, Linear] = {}
        self._biases: dict[int, Linear] = {}
        if part.count == 1:
            return
        for layer in model.modules():
            if isinstance(layer, Linear):
                self._weights[memory_of(layer.weight)] = layer
                if layer.bias is not None:
                    self._biases[memory_of(layer.bias)] = layer

    def of(self, tensor: Tensor, place: Tensor) -> Tensor:
        """What of a whole tensor belongs to this place, a view of a parameter. Of a layer whose
        results are added up, only the first rank has a bias."""
        memory = memory_of(place)
        if (layer := self._weights.get(memory)) is not None:
            outputs = 0 if place.stride(-1) == 1 else 1  # some checkpoints have [inputs, outputs]
            if layer.split is Parallel.OUTPUTS:
                return self._cut(tensor, outputs, layer.fused)
            return self._cut(tensor, 1 - outputs, 1) if layer.split is Parallel.INPUTS else tensor
        if (layer := self._biases.get(memory)) is not None:
            if layer.split is Parallel.OUTPUTS:
                return self._cut(tensor, 0, layer.fused)
            if layer.split is Parallel.INPUTS and self._part.rank > 0:
                return tensor.new_zeros(tensor.shape)
        return tensor

    def _cut(self, tensor: Tensor, dim: int, fused: int) -> Tensor:
        size = tensor.shape[dim]
        if size % (fused * self._part.count):
            return tensor  # of another shape than the model's: whoever fills it says so
        parts = tensor.unflatten(dim, (fused, self._part.count, -1))
        return parts.select(dim + 1, self._part.rank).flatten(dim, dim + 1)


def memory_of(tensor: Tensor) -> int:
    """The same for all views of a parameter."""
    return tensor.untyped_storage().data_ptr()
