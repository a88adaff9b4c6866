"""The device of Triton kernels in tests; import it before anything of worker_proc/gpu."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytest.importorskip("triton", reason="triton is not installed; pip install -e '.[test]' has it")
needs_float32_codes = pytest.mark.skipif(
    DEVICE.type == "cuda", reason="on a GPU, codes are multiplied in 16 bits, and this is float32"
)


class _Numpy:
    """numpy for Triton's interpreter, with products whose rows do not depend on each other.

    A GPU computes every row of a tile alike. numpy's BLAS does not: on some CPUs the rows at the
    end of a matrix are added up in another order.
    """

    def __getattr__(self, name: str) -> Any:
        value = getattr(np, name)
        setattr(self, name, value)  # the next look-up finds it at once
        return value

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


class _Inspect:
    """The module `inspect` for Triton's interpreter, which remembers what it has found.

    The interpreter searches Triton's language for built-in functions at every launch of a kernel.
    """

    def __init__(self) -> None:
        self._builtins: dict[Any, list[tuple[str, Any]]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(inspect, name)

    def getmembers(self, package: Any) -> list[tuple[str, Any]]:
        """Return the built-in functions of a package of Triton's language that are not replaced."""
        found = self._builtins.get(package)
        if found is None:
            is_builtin = interpreter.tl.core.is_builtin
            found = [(name, member) for name, member in inspect.getmembers(package)
                     if is_builtin(member)]  # fmt: skip
            self._builtins[package] = found
        return [(name, member) for name, member in found if getattr(package, name) is member]


def _remembering(numpy_type_of: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Make the interpreter's numpy type of a Triton type from what it has said of that before."""
    of_scalar = functools.cache(numpy_type_of)

    def of(kind: Any) -> Any:
        scalar = kind.scalar  # a block has the numpy type of its elements
        return numpy_type_of(scalar) if scalar.is_ptr() else of_scalar(scalar)

    return of


if DEVICE.type == "cpu":
    from triton.runtime import interpreter

    from worker_proc.gpu.interpreter import accept_numpy_scalars

    accept_numpy_scalars()
    interpreter.np = _Numpy()
    interpreter.inspect = _Inspect()
    interpreter._get_np_dtype = _remembering(interpreter._get_np_dtype)
