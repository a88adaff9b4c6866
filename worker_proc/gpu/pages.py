"""KV pages on a GPU, and the attention of one step over them."""

import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
import torch
from torch import Tensor

from worker_proc.gpu.kernels.attention import (
    MAX_SPLITS,
    attend_over_pages,
    queries_of_block,
    rotate_and_write,
)
from worker_proc.models.attention import AttentionShape, BatchLayout, Ints
from worker_proc.models.layers import Attention
from worker_proc.models.transfer import send_all
from worker_proc.step.inputs import StepInputs
from worker_proc.step.slot_table import SlotTable

PROGRAMS_PER_PROCESSOR = 2  # with fewer on each multiprocessor, a row's keys are split
LONG_CONTEXT = 8192  # tokens; steps with a longer row split every row's keys
LONG_SPLITS = 16
MAX_WRITING_ERROR = 0.01  # relative, of results that are rounded to 8 bits
MIN_SPLIT_CONTEXT = 1024  # tokens; shorter prompts are not split


# For comparisons: with "plain", cuBLAS computes all products, and every kernel does one thing.
STEPS_VARIABLE, PLAIN = "QUADRIGA_GPU_STEPS", "plain"


def wants_plain_steps() -> bool:
    """Return whether steps are to be computed without what makes those of few rows faster."""
    return os.environ.get(STEPS_VARIABLE) == PLAIN


class Pages:
    """The pages of all layers.

    A layer is `[2 (keys, values), pages + 1, page_size, kv_heads, head_dim]`; page tables are
    padded with the last page.

    Attributes:
        pool: `[layers, 2, pages + 1, page_size, kv_heads, head_dim]`.
        layers: the layers of the pool.
    """

    def __init__(
        self,
        shape: AttentionShape,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.shape = shape
        size = (2, num_pages + 1, page_size, shape.kv_heads, shape.head_dim)
        self._num_programs = PROGRAMS_PER_PROCESSOR * num_multiprocessors(device)
        self.pool = torch.zeros((shape.layers, *size), dtype=dtype, device=device)
        self.layers = self.pool.unbind()

    def num_splits(self, num_blocks: int, is_long: bool) -> int:
        """Return into how many parts the keys of each block of queries are split.

        Args:
            num_blocks: of the launch.
            is_long: a row has more than LONG_CONTEXT tokens, which one program would walk through
                long after the others have ended.
        """
        splits = LONG_SPLITS if is_long else 1
        heads = self.shape.kv_heads
        while splits < MAX_SPLITS and num_blocks * heads * splits < self._num_programs:
            splits *= 2
        return splits


def num_multiprocessors(device: torch.device) -> int:
    """Return the multiprocessors of a GPU; 2 in Triton's interpreter."""
    if device.type != "cuda":
        return 2  # in Triton's interpreter: enough for tests to see keys split
    return torch.cuda.get_device_properties(device).multi_processor_count


@dataclass(frozen=True, slots=True)
class Launch(ABC):
    """A kernel launch for the attention of neighbouring tokens [first, last) of a step."""

    first: int
    last: int

    def can_write(self, attention: Attention) -> bool:
        """Return whether `attend` can do what `rotate_and_write` does, too."""
        return False

    @abstractmethod
    def attend(
        self,
        q: Tensor,
        pool: Tensor,
        out: Tensor,
        attention: Attention,
        nonfinite_from: Tensor | None = None,
    ) -> None:
        """Attend.

        Args:
            q: `[tokens, heads, head_dim]`, which may be strided by token.
            pool: a layer's pages.
            out: receives `[tokens, heads * head_dim]`.
            attention: scale, soft cap, window and sinks of the layer.
            nonfinite_from: as in `attend_over_pages`, if the launch can write.
        """


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """Where the tokens of a step belong. All tensors are on the device.

    Attributes:
        known: `[slots, context + 1]` int32: the known tokens of every slot.
        page_table: `[slots, pages]` int64.
        slots, positions: `[tokens]` int64.
        nonfinite_from: `[slots]` int64, see SlotTable.
        launches: kernel launches for the attention of all tokens.
    """

    known: Tensor
    page_table: Tensor
    slots: Tensor
    positions: Tensor
    nonfinite_from: Tensor
    launches: tuple[Launch, ...]

    @classmethod
    def of(
        cls, table: SlotTable, slots: Tensor, positions: Tensor, *launches: Launch
    ) -> "AttentionMetadata":
        """Return the metadata of a step of a table."""
        return cls(table.tokens, table.pages, slots, positions, table.nonfinite_from, launches)

    def attend(self, pool: Tensor, qkv: Tensor, attention: Attention) -> Tensor:
        """Normalize and rotate queries and keys, write keys and values to the pages, attend.

        Args:
            pool: a layer's pages.
            qkv: `[tokens, heads + 2 * kv_heads, head_dim]`, which is changed.
            attention: what the layer does.

        Returns:
            `[tokens, heads * head_dim]`.
        """
        heads = qkv.shape[1] - 2 * pool.shape[3]
        out = qkv.new_empty(len(qkv), heads * qkv.shape[2])
        writing = [launch.can_write(attention) for launch in self.launches]
        if not all(writing):
            rotate_and_write(
                qkv, pool, self.page_table, self.slots, self.positions, attention,
                self.nonfinite_from, out,
            )  # fmt: skip
        for launch, writes in zip(self.launches, writing, strict=True):
            tokens = slice(launch.first, launch.last)
            nonfinite_from = self.nonfinite_from if writes else None
            launch.attend(qkv[tokens, :heads], pool, out[tokens], attention, nonfinite_from)
        return out


@dataclass(frozen=True, slots=True)
class TritonLaunch(Launch):
    """A launch of our kernel; `blocks` and `splits` as in attend_over_pages.

    Attributes:
        writes: all launches of the step are of single tokens, whose keys the kernel writes itself.
    """

    page_table: Tensor
    blocks: Tensor
    splits: int
    writes: bool = False

    def can_write(self, attention: Attention) -> bool:
        return self.writes and (attention.norms is None or not attention.norms.whole)

    def attend(
        self,
        q: Tensor,
        pool: Tensor,
        out: Tensor,
        attention: Attention,
        nonfinite_from: Tensor | None = None,
    ) -> None:
        attend_over_pages(
            q, pool, self.page_table, self.blocks, out, attention, self.splits, nonfinite_from
        )


class TritonAttention:
    """Decides how the attention of a step is launched, with our kernel.

    With `deterministic`, every query is computed in the same way, whatever else is in the step.

    Args:
        pages: the KV pool.
        dtype: of the weights, and so of the queries.
        deterministic: see above.

    Attributes:
        max_queries: queries of a block.
    """

    def __init__(self, pages: Pages, dtype: torch.dtype, deterministic: bool) -> None:
        self._pages, self._dtype = pages, dtype
        self._deterministic = deterministic
        self._writes = not deterministic and not wants_plain_steps()
        shape = pages.shape
        group = shape.heads // shape.kv_heads
        self.max_queries = queries_of_block(group, shape.head_dim, dtype)

    def check_writing(self, layers: Sequence[Attention]) -> None:
        """Let the kernel of decode rows write keys only if that gives what two kernels give.

        Args:
            layers: the attention of every layer, of which the first two are tried.
        """
        if not self._writes:
            return
        try:
            for attention, splits in product(layers[:2], (1, 2)):
                usual, ours = (
                    self._attended(attention, splits, writes) for writes in (False, True)
                )
                if not (ours - usual).norm() <= MAX_WRITING_ERROR * usual.norm():
                    raise ArithmeticError("its results differ")
        except Exception as error:  # of the compiler or the driver
            self._writes = False
            logging.warning(
                "attention cannot write keys, which a kernel of its own does: %s: %s",
                type(error).__name__, str(error)[:200],
            )  # fmt: skip

    def _attended(self, attention: Attention, splits: int, writes: bool) -> Tensor:
        """Return attention and pages of two random rows, in float32."""
        shape, layer = self._pages.shape, self._pages.layers[0]
        device, page_size = layer.device, layer.shape[2]
        generator = torch.Generator(device).manual_seed(0)
        size = (2, shape.heads + 2 * shape.kv_heads, shape.head_dim)
        qkv = torch.randn(size, device=device, generator=generator).to(self._dtype)
        pool = torch.randn(2, 3, *layer.shape[2:], device=device, generator=generator)
        pool = pool.to(layer.dtype)
        slots = torch.arange(2, device=device)
        positions = slots * (page_size - 1)
        page_table, nonfinite_from = slots[:, None].contiguous(), torch.full_like(slots, 1 << 40)
        launch = TritonLaunch(0, 2, page_table, torch.stack((slots, positions)), splits, writes)
        metadata = AttentionMetadata(slots, page_table, slots, positions, nonfinite_from, (launch,))
        out = metadata.attend(pool, qkv, attention)
        return torch.cat((out.float().flatten(), pool.float().flatten()))

    def plan_blocks(
        self, table: SlotTable, slots: Tensor, positions: Tensor, blocks: Tensor
    ) -> AttentionMetadata:
        """Plan a step from blocks `[4, blocks]` that are on the device, see query_blocks."""
        launch = TritonLaunch(0, len(slots), table.pages, blocks, 1)
        return AttentionMetadata.of(table, slots, positions, launch)

    def plan_all_kinds(self, table: SlotTable) -> AttentionMetadata:
        """Plan a step of padding that launches every kernel that a step may launch."""
        slots = torch.full((1,), -1, device=table.device)
        positions = torch.zeros_like(slots)
        one, several = (torch.stack([slots, positions] * pairs) for pairs in (1, 2))
        kinds = [(several, 1, False)]
        if not self._deterministic:
            kinds += [(several, 2, False), (one, 1, False), (one, 2, False)]
        if self._writes:
            kinds += [(one, 1, True), (one, 2, True)]
        launches = tuple(TritonLaunch(0, 1, table.pages, *kind) for kind in kinds)
        return AttentionMetadata.of(table, slots, positions, *launches)

    def plan_step(self, inputs: StepInputs) -> AttentionMetadata:
        """Plan a step of any kind."""
        layout, table = inputs.layout, inputs.table
        num_single = 0 if self._deterministic else int((layout.num_tokens == 1).sum())
        is_long = bool((layout.num_computed + layout.num_tokens > LONG_CONTEXT).any())
        cut = query_blocks(layout, num_single, self.max_queries)
        slots, positions, blocks = send_all(
            table.device,
            inputs.token_slots,
            inputs.token_positions,
            cut,
        )
        launches: list[Launch] = []
        if num_single:
            decode = torch.stack((slots[:num_single], positions[:num_single]))
            splits = self._pages.num_splits(num_single, is_long)
            writes = self._writes and num_single == len(slots)
            launches.append(TritonLaunch(0, num_single, table.pages, decode, splits, writes))
        if num_single < len(slots):
            launches.append(self.launch_prompts(inputs, num_single, cut, blocks))
        return AttentionMetadata.of(table, slots, positions, *launches)

    def launch_prompts(
        self, inputs: StepInputs, num_single: int, blocks: Ints, on_device: Tensor
    ) -> Launch:
        """Plan the tokens of a step behind those of its rows of one token.

        Args:
            inputs: the step.
            num_single: rows of one token, which come first.
            blocks: `[4, blocks]` of the other rows, see query_blocks.
            on_device: the same on the device.
        """
        splits, num_tokens = self._splits_of_prompts(blocks), len(inputs.token_slots)
        return TritonLaunch(num_single, num_tokens, inputs.table.pages, on_device, splits)

    def _splits_of_prompts(self, blocks: Ints) -> int:
        """Split the keys of few queries behind a long prefix, such as the next turn of a chat."""
        longest = int((blocks[1] + blocks[3]).max())
        if self._deterministic or longest <= MIN_SPLIT_CONTEXT:
            return 1
        return self._pages.num_splits(blocks.shape[1], False)

    def plan_decode(
        self, table: SlotTable, slots: Tensor, positions: Tensor, is_long: bool
    ) -> AttentionMetadata:
        """Plan a step of one token for each slot `[rows]`, without synchronising with the host.

        Args:
            table: the slots.
            slots: `[rows]`; a row with slot -1 is padding.
            positions: `[rows]`.
            is_long: a row has more than LONG_CONTEXT tokens.
        """
        num_rows = len(slots)
        blocks, splits = [slots, positions], self._pages.num_splits(num_rows, is_long)
        if self._deterministic:
            index = torch.arange(num_rows, device=slots.device)
            blocks, splits = [*blocks, index, torch.ones_like(index)], 1
        launch = TritonLaunch(0, num_rows, table.pages, torch.stack(blocks), splits, self._writes)
        return AttentionMetadata.of(table, slots, positions, launch)


def query_blocks(layout: BatchLayout, first_row: int, max_queries: int) -> Ints:
    """Cut the rows from `first_row` on into blocks of queries.

    Args:
        layout: the rows of the step.
        first_row: the first row to cut.
        max_queries: queries of a block.

    Returns:
        `[4, blocks]`: slot, first position, first token (counted from the first of these rows),
        and number of queries. The last blocks come first: they have the most keys, and no program
        should walk through them when the others have ended.
    """
    slots, num_computed = layout.slots[first_row:], layout.num_computed[first_row:]
    num_tokens = layout.num_tokens[first_row:]
    counts = -(-num_tokens // max_queries)
    row = np.repeat(np.arange(len(slots)), counts)
    first_block = np.cumsum(counts) - counts
    offset = (np.arange(len(row)) - first_block[row]) * max_queries
    first_token = (np.cumsum(num_tokens) - num_tokens)[row] + offset
    queries = np.minimum(num_tokens[row] - offset, max_queries)
    blocks: Ints = np.stack((slots[row], num_computed[row] + offset, first_token, queries))
    last_first: Ints = blocks[:, ::-1].copy()
    return last_first
