"""Where Triton kernels run in tests; to be imported before anything of worker_proc/gpu."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytest.importorskip("triton", reason="triton is not installed; pip install -e '.[test]' has it")


class _Numpy:
    """numpy for Triton's interpreter, with products whose rows do not depend on each other.

    A GPU computes every row of a tile alike. numpy's BLAS does not: on some CPUs the rows at the
    end of a matrix are added up in another order.
    """

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)

    @staticmethod
    def matmul(
        a: npt.NDArray[Any], b: npt.NDArray[Any], dtype: npt.DTypeLike | None = None
    ) -> npt.NDArray[Any]:
        kind = np.result_type(a, b) if dtype is None else dtype
        a, b = a.astype(kind), b.astype(kind)
        total = np.zeros((*a.shape[:-1], b.shape[-1]), kind)
        for k in range(a.shape[-1]):
            total += a[..., :, k, None] * b[..., k, None, :]
        return total


if DEVICE.type == "cpu":
    from triton.runtime import interpreter

    interpreter.np = _Numpy()
