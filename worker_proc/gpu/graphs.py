"""Decode steps as CUDA graphs: launched as one, at batch sizes to which a step is padded.

A graph replays the very kernels, on the very memory, that were captured. So what changes from step
to step is copied to a fixed place before, in one small array; rows that pad a step have slot -1,
which every kernel skips.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from worker_proc.attention.base import Ints
from worker_proc.system.transfer import send

SLOT, POSITION, GREEDY = range(3)  # rows of a graph's inputs [3, batch size] int64


class DecodeOutput(NamedTuple):
    """Hidden states `[rows, hidden]` and sampled tokens `[rows]` int64 of a decode step."""

    hidden: Tensor
    token_ids: Tensor


# Runs a decode step on inputs [3, rows]; the flag says that some rows are not greedy.
Decode = Callable[[Tensor, bool], DecodeOutput]
# Replays what was captured, and the tensors that hold its output afterwards.
Captured = tuple[Callable[[], None], DecodeOutput]
Capture = Callable[[Callable[[], DecodeOutput]], Captured]


def batch_sizes(max_rows: int) -> list[int]:
    """Return the sizes to which steps are padded, ascending.

    They are close together where a step is short, and a step is padded by an eighth at most where
    it is long.
    """
    sizes = [1, 2, 4]
    while sizes[-1] < max_rows:
        sizes.append(sizes[-1] + max(4, sizes[-1] // 64 * 8))
    return [size for size in sizes if size < max_rows] + [max_rows]


class CudaCapture:
    """Captures graphs that share one pool of memory, as no two of them run at once."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Callable[[], DecodeOutput]) -> Captured:
        """Capture `run`."""
        run()  # compiles the kernels, which is impossible during a capture
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Other threads, such as those of NCCL, must be able to call the driver meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            output = run()
        return graph.replay, output


class DecodeGraphs:
    """Graphs of a decode step, for greedy rows and for rows that are drawn.

    Attributes:
        max_rows: Rows of the largest step that there is a graph for.
        last_replay: Replays the last graph again, on the same inputs.
    """

    def __init__(
        self,
        decode: Decode,
        sizes: Sequence[int],
        device: torch.device,
        capture: Capture,
        log_progress: Callable[[int, int], None],
    ) -> None:
        """Capture, the largest size first, whose memory the smaller ones then use.

        Args:
            decode: The step.
            sizes: Rows of the steps to capture, ascending.
            device: The GPU.
            capture: Captures a call.
            log_progress: Takes the number of captured graphs, and of all, after each.
        """
        self.max_rows = sizes[-1]
        self.last_replay: Callable[[], None] | None = None
        self._sizes = np.array(sizes)
        self._device = device
        self._inputs: dict[int, Tensor] = {}
        self._graphs: dict[tuple[int, bool], Captured] = {}
        for size in reversed(sizes):
            padding = _padded(size, np.empty((3, 0), dtype=np.int64))
            self._inputs[size] = inputs = send(padding, device)
            for drawing in (True, False):
                self._graphs[size, drawing] = capture(partial(decode, inputs, drawing))
                log_progress(len(self._graphs), 2 * len(sizes))

    def run(self, slots: Ints, positions: Ints, greedy: Ints) -> DecodeOutput:
        """Decode the token at a position of each slot, `[rows]`.

        Returns:
            The output, whose hidden states are valid until the next step.
        """
        num_rows = len(slots)
        size = int(self._sizes[np.searchsorted(self._sizes, num_rows)])
        inputs = _padded(size, np.stack((slots, positions, greedy)))
        self._inputs[size].copy_(send(inputs, self._device), non_blocking=True)
        replay, output = self._graphs[size, not greedy.all()]
        replay()
        self.last_replay = replay
        return DecodeOutput(output.hidden[:num_rows], output.token_ids[:num_rows].clone())


def _padded(size: int, inputs: Ints) -> Ints:
    """Pad inputs `[3, rows]` to `[3, size]`."""
    padded = np.zeros((3, size), dtype=np.int64)
    padded[SLOT], padded[GREEDY] = -1, 1
    padded[:, : inputs.shape[1]] = inputs
    return padded
