"""Weights in the form in which the kernels multiply them, and memory for them."""

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from worker_proc.cpu.groups import Groups
from worker_proc.system.large_pages import in_large_pages

LANES = 16
UNIT_BYTES = 4
ALIGNMENT = 64
SHELF_BYTES, LARGE_BYTES = 1 << 26, 1 << 24


def round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def to_panels(weight: Tensor) -> Tensor:
    """[outputs, inputs] to [panels, depth, 16] int32: 16 outputs side by side, and for each depth
    the 4 bytes of one float32 input or two bfloat16 ones. Filled up with zeros."""
    pack = UNIT_BYTES // weight.dtype.itemsize
    outputs, inputs = weight.shape
    weight = F.pad(weight, (0, -inputs % pack, 0, -outputs % LANES)).contiguous()
    units = weight.view(torch.int32).view(-1, LANES, weight.shape[1] // pack)
    panels = empty(units.numel() * UNIT_BYTES).view(torch.int32)
    panels = panels.view(units.shape[0], units.shape[2], LANES)
    return panels.copy_(units.transpose(1, 2))


def to_quantised_panels(groups: Groups) -> Tensor:
    """[panels, panel_units] int32, as quantised.h says. Filled up with zeros."""
    lines = groups.by_rows(_sixteens)
    units = lines.numbers.unflatten(3, (-1, UNIT_BYTES)).permute(0, 2, 3, 1, 4)
    factors = [lines.scale]
    if lines.least is not None:
        low, high = units.chunk(2, 2)
        units = low | high << 4
        factors.append(lines.least)
    parts = [units.flatten(1)]
    parts += [f.transpose(1, 2).flatten(1).half().view(torch.uint8) for f in factors]
    panels = torch.cat(parts, 1)
    return empty(panels.numel()).view(panels.shape).copy_(panels).view(torch.int32)


def _sixteens(rows: Tensor) -> Tensor:
    """[outputs, ...] to [panels, 16, ...]."""
    padding = [0, 0] * (rows.dim() - 1) + [0, -len(rows) % LANES]
    return F.pad(rows, padding).unflatten(0, (-1, LANES))


def interleaved(weight: Tensor) -> Tensor:
    """Gate and up [2 * inner, ...] so that 16 of the one and 16 of the other take turns; inner is
    filled up with zeros to a multiple of 16."""
    inner = len(weight) // 2
    padding = [0, 0] * (weight.dim() - 1) + [0, -inner % LANES]
    gate, up = (F.pad(part, padding) for part in weight.split(inner))
    pairs = torch.stack((gate.unflatten(0, (-1, LANES)), up.unflatten(0, (-1, LANES))), 1)
    return pairs.flatten(0, 2)


class _Shelf:
    """One large mapping, cut up for what is smaller than large pages."""

    def __init__(self) -> None:
        self._bytes = np.empty(0, dtype=np.uint8)

    def take(self, size: int) -> NDArray[np.uint8]:
        if size > len(self._bytes):
            self._bytes = _mapping(SHELF_BYTES)
        taken, self._bytes = self._bytes[:size], self._bytes[size:]
        return taken


_shelf = _Shelf()


def empty(size: int) -> Tensor:
    """`size` bytes, zero, in large pages where the system has them: reading weights, or keys and
    values that lie here and there, then waits less for address translation."""
    length = round_up(max(size, 1), ALIGNMENT)
    memory = _shelf.take(length) if length < LARGE_BYTES else _mapping(length)
    return torch.from_numpy(memory[:size])


def _mapping(length: int) -> NDArray[np.uint8]:
    return np.frombuffer(in_large_pages(length), dtype=np.uint8)
