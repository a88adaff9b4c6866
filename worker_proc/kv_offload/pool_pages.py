"""The bytes of the pages of a KV pool, whatever an engine keeps in them."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Bytes = NDArray[np.uint8]


class PoolPages:
    """Access to the pages of a pool in the computer's memory.

    Attributes:
        page_bytes: Size of a page, in all layers together.
    """

    def __init__(self, parts: Sequence[Tensor], numbers: Sequence[Tensor] | None = None) -> None:
        """Take what `Engine.kv_parts` and `Engine.kv_numbers` return."""
        self._numbers = parts if numbers is None else numbers
        self._parts: list[Bytes] = [part.flatten(1).view(torch.uint8).numpy() for part in parts]
        self.page_bytes = sum(part.shape[1] for part in self._parts)

    def buffers(self, page: int) -> list[Bytes]:
        """Return the memory of a page, in pieces."""
        return [part[page] for part in self._parts]

    def is_finite(self, page: int) -> bool:
        """Return whether no number of a page is NaN or infinite."""
        return all(
            torch.stack(part[page].aminmax()).isfinite().all()
            for part in self._numbers
            if part.is_floating_point()
        )

    def copy_out(self, page: int, out: Bytes) -> None:
        """Copy a page to `out`, of `page_bytes`."""
        np.concatenate(self.buffers(page), out=out)
