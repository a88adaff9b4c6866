"""Steps as CUDA graphs: launched as one, at sizes to which a step is padded.

First the sizes, then the capture and replay of decode steps and of steps with prompts.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from quadriga.wire.worker import NO_ADAPTER
from worker_proc.gpu.adapters import group_rows, num_blocks_of
from worker_proc.gpu.kernels.adapters import BLOCK_FIELDS, RowGroups
from worker_proc.models.attention import Ints
from worker_proc.models.transfer import send, send_into
from worker_proc.step.clock import RunningStep

# Of the steps with prompts that have graphs.
MIN_PROMPT_TOKENS, MAX_PROMPT_TOKENS, MAX_SMALL_MODEL_TOKENS = 32, 1024, 8192
# Tokens times parameters of a step that takes a GPU about as long as its launches take the host: on
# an H100 3 ms, for some 100 kernels.
LAUNCH_BOUND = 10**12


def batch_sizes(max_rows: int) -> list[int]:
    """Return the sizes to which decode steps are padded, ascending.

    They are close together where a step is short, and a step is padded by an eighth at most where
    it is long.
    """
    sizes = [1, 2, 4]
    while sizes[-1] < max_rows:
        sizes.append(sizes[-1] + max(4, sizes[-1] // 64 * 8))
    return [size for size in sizes if size < max_rows] + [max_rows]


def prompt_sizes(max_tokens: int, num_parameters: int) -> list[int]:
    """Return the numbers of tokens to which steps with prompts are padded, ascending.

    A step is padded by a quarter or by 31 tokens at most: where it fills the GPU, its time grows
    with its tokens. The largest steps of a small model are captured, too, since launching their
    kernels one by one would take longer than the kernels.

    Args:
        max_tokens: tokens of the KV pool.
        num_parameters: of the model.
    """
    bound = min(LAUNCH_BOUND // num_parameters, MAX_SMALL_MODEL_TOKENS)
    largest = min(max_tokens, max(MAX_PROMPT_TOKENS, bound))
    sizes, size = [], MIN_PROMPT_TOKENS
    while size <= largest:
        sizes.append(size)
        size += max(MIN_PROMPT_TOKENS, 2 ** (size.bit_length() - 3))
    return sizes


# Steps as CUDA graphs: launched as one, at sizes to which a step is padded.
#
# A graph replays the very kernels, on the very memory, that were captured. So what changes from
# step to step is copied to a fixed place before, in one small array. Padding has slot -1, which
# every kernel skips.
#
# There are two kinds. In a decode step every row has one token and samples. A step with prompts
# is described by its tokens, by the blocks of queries that its attention computes, and by the
# tokens that are sampled from; all three are padded. A step with drafts is of the second kind.

NO_ROWS: Ints = np.empty(0, dtype=np.int64)


class GraphOutput(NamedTuple):
    """What a step has computed of the rows that sample.

    Attributes:
        logits: `[rows, vocab_size]`, in a buffer that all graphs share.
        token_ids: `[rows]` int64, sampled from the logits as they are.
    """

    logits: Tensor
    token_ids: Tensor


# Replays what was captured, and the tensors that hold its output afterwards.
Captured = tuple[Callable[[], None], GraphOutput]
Capture = Callable[[Callable[[], GraphOutput]], Captured]
LogProgress = Callable[[int, int], None]


class DecodeInputs(NamedTuple):
    """A decode step: slots and positions `[rows]`, and the rows that have adapters, if any do."""

    slots: Tensor
    positions: Tensor
    groups: RowGroups | None = None


class PromptInputs(NamedTuple):
    """A step with prompts.

    Attributes:
        slots, positions: `[tokens]`.
        blocks: `[4, blocks]`, see pages.query_blocks.
        sampled: `[samples]` the tokens after which one is sampled.
        sampled_slots, sampled_positions: `[samples]` their slots and positions.
    """

    slots: Tensor
    positions: Tensor
    blocks: Tensor
    sampled: Tensor
    sampled_slots: Tensor
    sampled_positions: Tensor


class CudaCapture:
    """Captures graphs that share one pool of memory, as no two of them run at once."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Callable[[], GraphOutput]) -> Captured:
        """Capture `run`."""
        run()  # compiles the kernels, which is impossible during a capture
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Other threads, such as those of NCCL, must be able to call the driver meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            output = run()
        return graph.replay, output


class CapturedStep:
    """A step that was captured at one size, and the place of its inputs."""

    def __init__(
        self,
        run: Callable[[Tensor], GraphOutput],
        padding: Ints,
        device: torch.device,
        capture: Capture,
    ) -> None:
        """Capture `run` on inputs that are all padding."""
        self._inputs = send(padding, device)
        self.replay, self._output = capture(partial(run, self._inputs))

    def run(self, inputs: Ints, num_rows: int, clock: RunningStep) -> GraphOutput:
        """Replay the step with padded inputs, and return the first rows of its output.

        The logits are valid until the next step.
        """
        send_into(self._inputs, inputs, clock.start)
        self.replay()
        logits, token_ids = self._output
        return GraphOutput(logits[:num_rows], token_ids[:num_rows].clone())


class DecodeGraphs:
    """Graphs of decode steps.

    Attributes:
        max_rows: rows of the largest step that there is a graph for.
        last_replay: replays the last graph again, on the same inputs.
    """

    def __init__(
        self,
        decode: Callable[[DecodeInputs, bool], GraphOutput],
        sizes: Sequence[int],
        has_long: Callable[[int], bool],
        device: torch.device,
        capture: Capture,
        log_progress: LogProgress,
        max_adapters: int = 0,
    ) -> None:
        """Capture, the largest size first, whose memory the smaller ones then use.

        Args:
            decode: the step; the flag says that its rows may be long.
            sizes: rows of the steps to capture, ascending.
            has_long: whether a step of `rows` rows runs otherwise if one of them is long.
            device: the GPU.
            capture: captures a call.
            log_progress: takes the number of captured graphs, and of all, after each.
            max_adapters: adapters that a step may have, all of whose kernels are in the graphs; 0:
                steps have none.
        """
        self.max_rows = sizes[-1]
        self.last_replay: Callable[[], None] | None = None
        self._sizes = np.array(sizes)
        self._max_adapters = max_adapters
        self._graphs: dict[tuple[int, bool], CapturedStep] = {}
        kinds = [(size, long) for size in reversed(sizes) for long in (False, True)
                 if not long or has_long(size)]  # fmt: skip
        for size, long in kinds:

            def run(inputs: Tensor, long: bool = long, size: int = size) -> GraphOutput:
                return decode(self._split(inputs, size), long)

            padding = self._padded(size, NO_ROWS, NO_ROWS, None)
            self._graphs[size, long] = CapturedStep(run, padding, device, capture)
            log_progress(len(self._graphs), len(kinds))

    def run(
        self,
        slots: Ints,
        positions: Ints,
        is_long: bool,
        clock: RunningStep,
        adapters: Ints | None = None,
    ) -> GraphOutput:
        """Decode the token at a position of each slot, `[rows]`; see CapturedStep.run.

        `adapters` `[rows]` are the indexes of their adapters, if the graphs have adapters.
        """
        num_rows = len(slots)
        size = int(self._sizes[np.searchsorted(self._sizes, num_rows)])
        graph = self._graphs.get((size, is_long)) or self._graphs[size, False]
        self.last_replay = graph.replay
        return graph.run(self._padded(size, slots, positions, adapters), num_rows, clock)

    def _padded(self, size: int, slots: Ints, positions: Ints, adapters: Ints | None) -> Ints:
        """Return the inputs of a step, in one array."""
        rows = _padded_rows(size, slots, positions)
        if not self._max_adapters:
            return rows
        padded = np.full(size, NO_ADAPTER, dtype=np.int64)
        if adapters is not None:
            padded[: len(adapters)] = adapters
        order, blocks = group_rows(padded, num_blocks_of(size, self._max_adapters))
        return np.concatenate((rows.ravel(), order, padded, blocks.ravel()))

    def _split(self, inputs: Tensor, size: int) -> DecodeInputs:
        """Return the parts of what `_padded` returns."""
        if not self._max_adapters:
            return DecodeInputs(*inputs)
        sizes = [size] * 4 + [len(inputs) - 4 * size]
        slots, positions, order, adapters, blocks = inputs.split(sizes)
        blocks = blocks.view(-1, BLOCK_FIELDS.value)
        return DecodeInputs(slots, positions, RowGroups(order, blocks, adapters))


def _padded_rows(size: int, slots: Ints = NO_ROWS, positions: Ints = NO_ROWS) -> Ints:
    """Return slots and positions `[2, size]`."""
    padded = np.zeros((2, size), dtype=np.int64)
    padded[0] = -1
    padded[0, : len(slots)], padded[1, : len(slots)] = slots, positions
    return padded


class PromptStep(NamedTuple):
    """A step with prompts on the host; the fields are those of PromptInputs."""

    slots: Ints
    positions: Ints
    blocks: Ints
    sampled: Ints
    sampled_slots: Ints
    sampled_positions: Ints


class PromptGraphs:
    """Graphs of steps with prompts.

    Attributes:
        last_replay: replays the last graph again, on the same inputs.
    """

    def __init__(
        self,
        compute: Callable[[PromptInputs], GraphOutput],
        sizes: Sequence[int],
        max_rows: int,
        max_samples: int,
        max_queries: int,
        device: torch.device,
        capture: Capture,
        log_progress: LogProgress,
    ) -> None:
        """Capture, the largest size first.

        Args:
            compute: the step.
            sizes: tokens of the steps to capture, ascending.
            max_rows: rows that a step may have.
            max_samples: tokens that a step may sample: after the last one of a row, and after each
                of its drafts.
            max_queries: queries of a block.
            device: the GPU.
            capture: captures a call.
            log_progress: as in DecodeGraphs.
        """
        self.last_replay: Callable[[], None] | None = None
        self._sizes = np.array(sizes)
        bounds = (max_rows, max_samples, max_queries)
        self._shapes = {size: _PromptShape.of(size, *bounds) for size in sizes}
        self._graphs: dict[int, CapturedStep] = {}
        for size in reversed(sizes):
            shape = self._shapes[size]

            def run(inputs: Tensor, shape: _PromptShape = shape) -> GraphOutput:
                return compute(shape.split(inputs))

            self._graphs[size] = CapturedStep(run, shape.padded(None), device, capture)
            log_progress(len(self._graphs), len(sizes))

    def run(self, step: PromptStep, clock: RunningStep) -> GraphOutput | None:
        """Compute a step; None if no graph was captured for such a step."""
        index = int(np.searchsorted(self._sizes, len(step.slots)))
        if index == len(self._sizes):
            return None
        size = int(self._sizes[index])
        shape, graph = self._shapes[size], self._graphs[size]
        if not shape.holds(step):
            return None
        self.last_replay = graph.replay
        return graph.run(shape.padded(step), len(step.sampled), clock)


class _PromptShape(NamedTuple):
    """Sizes of the inputs of a graph, which lie one after the other in one array."""

    tokens: int
    blocks: int
    samples: int

    @classmethod
    def of(cls, tokens: int, max_rows: int, max_samples: int, max_queries: int) -> "_PromptShape":
        num_blocks = -(-tokens // max_queries) + min(tokens, max_rows)
        return cls(tokens, num_blocks, min(tokens, max_samples))

    def holds(self, step: PromptStep) -> bool:
        """Return whether a step of at most `tokens` tokens fits."""
        return step.blocks.shape[1] <= self.blocks and len(step.sampled) <= self.samples

    def sizes(self) -> list[int]:
        return [self.tokens] * 2 + [4 * self.blocks] + [self.samples] * 3

    def split(self, inputs: Tensor) -> PromptInputs:
        slots, positions, blocks, *sampled = inputs.split(self.sizes())
        return PromptInputs(slots, positions, blocks.view(4, self.blocks), *sampled)

    def padded(self, step: PromptStep | None) -> Ints:
        """Return the inputs of a step; None: of a step of padding only."""
        parts: list[Ints] = [np.zeros(size, dtype=np.int64) for size in self.sizes()]
        parts[2] = parts[2].reshape(4, self.blocks)
        for part in (parts[0], parts[2][0], parts[4]):
            part[:] = -1
        for part, values in zip(parts, step or (), strict=False):
            part[..., : values.shape[-1]] = values
        return np.concatenate([part.ravel() for part in parts])
