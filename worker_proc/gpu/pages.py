"""KV pages on a card, and the attention of one step over them."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from worker_proc.attention.base import AttentionShape, Ints
from worker_proc.gpu.kernels.attention import attend_over_pages, queries_of_block
from worker_proc.gpu.kernels.rotate_write import rotate_and_write
from worker_proc.models.layers import HeadNorms, Rope
from worker_proc.step.inputs import StepInputs
from worker_proc.step.slot_table import SlotTable
from worker_proc.system.transfer import send_all

PROGRAMS_PER_PROCESSOR = 2
"""With fewer on each multiprocessor of a card, keys are split."""
MAX_SPLITS = 32


class Pages:
    """Layout of a layer: [2 (keys, values), pages + 1, page_size, kv_heads, head_dim]. The spare
    page is there to be gathered from where there is nothing."""

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
        self._programs = PROGRAMS_PER_PROCESSOR * _multiprocessors(device)
        self.layers = [torch.zeros(size, dtype=dtype, device=device) for _ in range(shape.layers)]

    def splits(self, rows: int) -> int:
        """Into how many parts the keys of each of so many decode rows are split."""
        splits = 1
        while splits < MAX_SPLITS and rows * self.shape.kv_heads * splits < self._programs:
            splits *= 2
        return splits


def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 2  # the interpreter's: enough that keys are split, which is to be seen in tests
    return torch.cuda.get_device_properties(device).multi_processor_count


@dataclass(frozen=True, slots=True)
class Launch(ABC):
    """The attention of neighbouring tokens [first, last) of a step, as one launch."""

    first: int
    last: int

    @abstractmethod
    def attend(self, q: Tensor, pool: Tensor, out: Tensor) -> None:
        """q: [tokens, heads, head_dim], strided by token; pool: of one layer; out: [tokens, heads *
        head_dim]."""


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """Where the tokens of a step belong. known: [slots, context] int32 what is known of every slot;
    page_table: [slots, pages]; slots, positions: [tokens] int64; launches: for attention. All on
    the device."""

    known: Tensor
    page_table: Tensor
    slots: Tensor
    positions: Tensor
    launches: tuple[Launch, ...]

    def attend(
        self, pool: Tensor, qkv: Tensor, rope: Rope | None, norms: HeadNorms | None
    ) -> Tensor:
        """qkv: [tokens, heads + 2 * kv_heads, head_dim]; pool: of one layer. Returns
        [tokens, heads * head_dim]."""
        heads = qkv.shape[1] - 2 * pool.shape[3]
        rotate_and_write(qkv, pool, self.page_table, self.slots, self.positions, rope, norms)
        out = qkv.new_empty(len(qkv), heads * qkv.shape[2])
        for one in self.launches:
            one.attend(qkv[one.first : one.last, :heads], pool, out[one.first : one.last])
        return out


class AttentionPlanner(ABC):
    """How the attention of a step is launched."""

    @abstractmethod
    def of_step(self, inputs: StepInputs) -> AttentionMetadata:
        """A step of any kind."""

    @abstractmethod
    def of_decode(self, table: SlotTable, slots: Tensor, positions: Tensor) -> AttentionMetadata:
        """A step of one token for each of these slots [rows], without a question to the host. A
        slot of -1 stands for nothing."""


@dataclass(frozen=True, slots=True)
class TritonLaunch(Launch):
    """blocks, splits: as attend_over_pages takes them."""

    page_table: Tensor
    blocks: Tensor
    splits: int

    def attend(self, q: Tensor, pool: Tensor, out: Tensor) -> None:
        attend_over_pages(q, pool, self.page_table, self.blocks, out, self.splits)


class TritonAttention(AttentionPlanner):
    """always_alike: every query is computed in the same way, whatever else is in the step."""

    def __init__(self, pages: Pages, always_alike: bool) -> None:
        self._pages = pages
        self._always_alike = always_alike

    def of_step(self, inputs: StepInputs) -> AttentionMetadata:
        rows, table = inputs.rows, inputs.table
        single = 0 if self._always_alike else int((rows.num_tokens == 1).sum())
        group = self._pages.shape.heads // self._pages.shape.kv_heads
        slots, positions, blocks = send_all(
            table.device,
            inputs.slot_of_token,
            inputs.position_of_token,
            blocks_of(rows.slots, rows.computed, rows.num_tokens, single, group),
        )
        launches: list[Launch] = []
        if single:
            decode = torch.stack((slots[:single], positions[:single]))
            splits = self._pages.splits(single)
            launches.append(TritonLaunch(0, single, table.pages, decode, splits))
        if single < len(slots):
            launches.append(TritonLaunch(single, len(slots), table.pages, blocks, 1))
        return AttentionMetadata(table.tokens, table.pages, slots, positions, tuple(launches))

    def of_decode(self, table: SlotTable, slots: Tensor, positions: Tensor) -> AttentionMetadata:
        rows = len(slots)
        blocks, splits = [slots, positions], self._pages.splits(rows)
        if self._always_alike:
            index = torch.arange(rows, device=slots.device)
            blocks, splits = [*blocks, index, torch.ones_like(index)], 1
        launch = TritonLaunch(0, rows, table.pages, torch.stack(blocks), splits)
        return AttentionMetadata(table.tokens, table.pages, slots, positions, (launch,))


def blocks_of(slots: Ints, computed: Ints, num_tokens: Ints, first_row: int, group: int) -> Ints:
    """Rows from first_row on, cut into blocks: [4, blocks] slot, first position, first token
    (counted from the first of these rows), queries."""
    slots, computed, num_tokens = slots[first_row:], computed[first_row:], num_tokens[first_row:]
    most = queries_of_block(group, 2)
    counts = -(-num_tokens // most)
    row = np.repeat(np.arange(len(slots)), counts)
    first_block = np.cumsum(counts) - counts
    ahead = (np.arange(len(row)) - first_block[row]) * most
    first_token = np.cumsum(num_tokens) - num_tokens
    left = num_tokens[row] - ahead
    return np.stack(
        (slots[row], computed[row] + ahead, first_token[row] + ahead, np.minimum(left, most))
    )
