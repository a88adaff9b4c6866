"""Products of a model that the kernel for few rows computes wherever it can."""

from collections.abc import Sequence

import torch
from torch import Tensor

from worker_proc.gpu.products import (
    CUBLAS_WAY,
    Fastest,
    Multiply,
    Products,
    ProductWay,
    Projection,
    ways_of,
)


class AlwaysFewRows(Products):
    """Chooses the kernel for few rows without a measurement, in any dtype and on any device.

    Attributes:
        num_computed: products that it has computed.
    """

    def __init__(
        self,
        device: torch.device,
        multiply: Multiply,
        can_choose: bool,
        may_begin_early: bool,
    ) -> None:
        super().__init__(device, multiply, can_choose=True)
        self.num_computed = 0

    def fastest(self, products: Sequence[Projection], rows: int) -> Fastest | None:
        """Return the last way, computed once as if it were measured."""
        way = list(ways_of(products[0], rows))[-1]
        # Without tensor cores, the compiler takes long for the tiles of many rows in float32.
        is_slow = rows > 16 and products[0].proj.weight.is_cuda
        if way == CUBLAS_WAY or is_slow:
            return None
        self.try_way(way, products[0], rows)
        return Fastest(way, 0.0, 0.0)

    def project_few(
        self,
        way: ProductWay,
        x: Tensor,
        product: Projection,
        residual: Tensor | None = None,
        factor: float = 1.0,
    ) -> Tensor:
        """Count the products."""
        self.num_computed += 1
        return super().project_few(way, x, product, residual, factor)
