"""Decode steps as CUDA graphs: launched as one, at batch sizes to which a step is padded.

A graph replays the very kernels, on the very memory, that were captured. So what changes from step
to step is copied to one fixed place before, in one small array; rows that pad a step belong to
slot -1, which every kernel passes over.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from worker_proc.attention.base import Ints
from worker_proc.system.transfer import send

SLOT, POSITION, GREEDY = range(3)
"""Rows of a graph's inputs [3, batch size] int64."""


class Decoded(NamedTuple):
    """hidden: [rows, hidden]; token_ids: [rows] int64."""

    hidden: Tensor
    token_ids: Tensor


Decode = Callable[[Tensor, bool], Decoded]
"""A decode step of inputs [3, rows], on the device; and whether some rows are not greedy."""
Captured = tuple[Callable[[], None], Decoded]
"""Does again what was captured, and where its results then lie."""
Capture = Callable[[Callable[[], Decoded]], Captured]


def batch_sizes(most: int) -> list[int]:
    """To which steps are padded, ascending: close together where a step is short, and never more
    than an eighth too large where it is long."""
    sizes = [1, 2, 4]
    while sizes[-1] < most:
        sizes.append(sizes[-1] + max(4, sizes[-1] // 64 * 8))
    return [size for size in sizes if size < most] + [most]


class CudaCapture:
    """Captures into one pool of memory, as never two of its graphs run at once."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Callable[[], Decoded]) -> Captured:
        run()  # compiles what is not compiled yet, which cannot be done while capturing
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Only of this thread: others, such as those of NCCL, go on asking the driver for things.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            decoded = run()
        return graph.replay, decoded


class DecodeGraphs:
    """Graphs of a decode step, for greedy rows and for rows that are drawn.

    sizes: ascending. Captures at construction, the largest first, so that the smaller ones find
    room in its memory. progress: called with (captured, all) after each.
    """

    def __init__(
        self,
        decode: Decode,
        sizes: Sequence[int],
        device: torch.device,
        capture: Capture,
        progress: Callable[[int, int], None],
    ) -> None:
        self._sizes = np.array(sizes)
        self._device = device
        self._inputs: dict[int, Tensor] = {}
        self._graphs: dict[tuple[int, bool], Captured] = {}
        for size in reversed(sizes):
            empty = _padded(size, np.empty((3, 0), dtype=np.int64))
            self._inputs[size] = inputs = send(empty, device)
            for drawing in (True, False):
                captured = capture(lambda inputs=inputs, drawing=drawing: decode(inputs, drawing))  # type: ignore[misc]
                self._graphs[size, drawing] = captured
                progress(len(self._graphs), 2 * len(sizes))

    def take(self, rows: int) -> bool:
        """Whether a step of so many rows can be one of these."""
        return rows <= int(self._sizes[-1])

    def run(self, slots: Ints, positions: Ints, greedy: Ints) -> Decoded:
        """Decode the tokens at these positions of these slots [rows]. What is returned stands until
        the next step."""
        rows = len(slots)
        size = int(self._sizes[np.searchsorted(self._sizes, rows)])
        inputs = _padded(size, np.stack((slots, positions, greedy)))
        self._inputs[size].copy_(send(inputs, self._device), non_blocking=True)
        replay, decoded = self._graphs[size, not greedy.all()]
        replay()
        return Decoded(decoded.hidden[:rows], decoded.token_ids[:rows].clone())


def _padded(size: int, inputs: Ints) -> Ints:
    """inputs [3, rows] to [3, size]."""
    padded = np.zeros((3, size), dtype=np.int64)
    padded[SLOT], padded[GREEDY] = -1, 1
    padded[:, : inputs.shape[1]] = inputs
    return padded
