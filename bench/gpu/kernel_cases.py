"""The kernels that bench.gpu.kernels measures, with the work of each."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain, product

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from worker_proc.attention.base import AttentionShape, BatchLayout
from worker_proc.gpu.kernels.activations import gate_up
from worker_proc.gpu.kernels.matmul import multiply
from worker_proc.gpu.kernels.rotate_write import rotate_and_write
from worker_proc.gpu.kernels.rows import add_and_norm
from worker_proc.gpu.kernels.sampling import sample_tokens
from worker_proc.gpu.pages import LONG_CONTEXT, Launch, Pages, TritonAttention, query_blocks
from worker_proc.models.layers import Activation, Attention, RMSNorm, Rope
from worker_proc.step.slot_table import SlotTable

PAGE_SIZE = 16
Call = Callable[[], object]


@dataclass(frozen=True, slots=True)
class KernelSizes:
    """Sizes of a model, and what is measured with them.

    Attributes:
        decode, prompts: (rows, tokens of each).
        rows: Rows of the kernels that take rows.
        ceiling_bytes, ceiling_width: With which the device itself is measured.
    """

    dtype: torch.dtype
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    inner: int
    vocab: int
    decode: tuple[tuple[int, int], ...]
    prompts: tuple[tuple[int, int], ...]
    rows: tuple[int, ...]
    ceiling_bytes: int = 0
    ceiling_width: int = 8192


FULL = KernelSizes(
    torch.bfloat16,
    32,
    8,
    128,
    4096,
    14_336,
    128_256,
    decode=((1, 1024), (8, 1024), (64, 1024), (256, 1024), (1, 8192), (64, 8192)),
    prompts=((1, 8192), (8, 1024), (64, 128)),
    rows=(1, 64, 256, 4096),
)
TINY = KernelSizes(torch.float32, 4, 2, 16, 64, 96, 500, ((2, 40),), ((1, 20),), (2,), 2**20, 64)
MAX_SAMPLING_ROWS = 256


@dataclass(frozen=True, slots=True)
class KernelCase:
    """A call to measure.

    Attributes:
        run: Launches the kernel.
        num_bytes: Read and written by it at least.
        num_operations: Multiplications and additions.
        other: The same by another library.
    """

    kernel: str
    shape: str
    run: Call
    num_bytes: int
    num_operations: int = 0
    other_name: str = ""
    other: Call | None = None


class Cases:
    """Makes the calls on a device; each holds its tensors until the next one is made."""

    def __init__(self, sizes: KernelSizes, device: torch.device) -> None:
        self._sizes, self._device = sizes, device
        self._attention = Attention(sizes.head_dim**-0.5)

    def all(self, word: str = "") -> Iterator[KernelCase]:
        """Yield the cases, only those with `word` in their kernel's name."""
        sizes = self._sizes
        kinds: list[tuple[str, Iterator[KernelCase]]] = [
            ("decode attention", (self._decode(*shape) for shape in sizes.decode)),
            ("prompt attention", (self._prompts(*shape) for shape in sizes.prompts)),
            ("rotate and write", map(self._rotate, sizes.rows)),
            ("add and norm", map(self._norm, sizes.rows)),
            ("gate and up", map(self._gate, sizes.rows)),
            ("choice of a token", self._sampling()),
            ("deterministic product", map(self._product, sizes.rows)),
        ]
        yield from chain.from_iterable(cases for name, cases in kinds if word in name)

    def _draw(self, *size: int) -> Tensor:
        return torch.randn(*size, device=self._device, dtype=self._sizes.dtype)

    # --- attention --------------------------------------------------------------------------------

    def _paged(self, rows: int, tokens: int) -> tuple[Pages, SlotTable]:
        """Return pages of random numbers, at random places, and a table of rows that have them."""
        sizes = self._sizes
        of_row = -(-tokens // PAGE_SIZE)
        shape = AttentionShape(1, sizes.heads, sizes.kv_heads, sizes.head_dim)
        pages = Pages(shape, rows * of_row, PAGE_SIZE, sizes.dtype, self._device)
        pages.layers[0].normal_()
        table = SlotTable(rows, of_row * PAGE_SIZE, rows * of_row, PAGE_SIZE, self._device)
        places = torch.randperm(rows * of_row, device=self._device)
        table.pages.copy_(places.view(rows, of_row))
        return pages, table

    def _contiguous(self, rows: int, tokens: int) -> tuple[Tensor, Tensor]:
        """Return keys and values `[rows, kv_heads, tokens, head_dim]`."""
        sizes = self._sizes
        keys, values = (self._draw(rows, sizes.kv_heads, tokens, sizes.head_dim) for _ in range(2))
        return keys, values

    def _decode(self, rows: int, tokens: int) -> KernelCase:
        pages, table = self._paged(rows, tokens)
        slots = torch.arange(rows, device=self._device)
        planner = TritonAttention(pages, self._sizes.dtype, deterministic=False)
        is_long = tokens > LONG_CONTEXT
        plan = planner.plan_decode(table, slots, torch.full_like(slots, tokens - 1), is_long)
        q, run = self._attending(plan.launches[0], pages, rows)
        keys, values = self._contiguous(rows, tokens)
        query = q.unsqueeze(2)
        return KernelCase(
            "decode attention",
            f"{rows} x {tokens}",
            run,
            2 * keys.nbytes,
            4 * q.numel() * tokens,
            "scaled_dot_product_attention",
            lambda: F.scaled_dot_product_attention(query, keys, values, enable_gqa=True),
        )

    def _prompts(self, rows: int, tokens: int) -> KernelCase:
        pages, table = self._paged(rows, tokens)
        planner = TritonAttention(pages, self._sizes.dtype, deterministic=False)
        row, zero = np.arange(rows), np.zeros(rows, dtype=np.int64)
        layout = BatchLayout(table.pages, row, zero, np.full(rows, tokens))
        blocks = torch.from_numpy(query_blocks(layout, 0, planner.max_queries)).to(self._device)
        token = torch.arange(rows * tokens, device=self._device)
        plan = planner.plan_blocks(table, token // tokens, token % tokens, blocks)
        q, run = self._attending(plan.launches[0], pages, rows * tokens)
        keys, values = self._contiguous(rows, tokens)
        query = q.view(rows, tokens, *q.shape[1:]).transpose(1, 2)
        pairs = tokens * (tokens + 1) // 2
        return KernelCase(
            "prompt attention",
            f"{rows} x {tokens}",
            run,
            2 * keys.nbytes + 2 * q.nbytes,
            4 * rows * q.shape[1] * q.shape[2] * pairs,
            "scaled_dot_product_attention",
            lambda: F.scaled_dot_product_attention(
                query, keys, values, is_causal=True, enable_gqa=True
            ),
        )

    def _attending(self, launch: Launch, pages: Pages, tokens: int) -> tuple[Tensor, Call]:
        sizes = self._sizes
        q = self._draw(tokens, sizes.heads, sizes.head_dim)
        out = torch.empty(tokens, sizes.heads * sizes.head_dim, device=q.device, dtype=q.dtype)
        return q, lambda: launch.attend(q, pages.layers[0], out, self._attention)

    # --- kernels over rows ------------------------------------------------------------------------

    def _rotate(self, rows: int) -> KernelCase:
        sizes = self._sizes
        pages, table = self._paged(rows, 1)
        attention = Attention(sizes.head_dim**-0.5)
        frequencies = torch.rand(sizes.head_dim // 2)
        attention.rope = Rope(frequencies, PAGE_SIZE, self._device)
        qkv = self._draw(rows, sizes.heads + 2 * sizes.kv_heads, sizes.head_dim)
        slots = torch.arange(rows, device=self._device)
        positions = torch.zeros_like(slots)
        out = torch.empty(
            rows, sizes.heads * sizes.head_dim, device=self._device, dtype=sizes.dtype
        )
        return KernelCase(
            "rotate and write",
            f"{rows} rows",
            lambda: rotate_and_write(
                qkv,
                pages.layers[0],
                table.pages,
                slots,
                positions,
                attention,
                table.nonfinite_from,
                out,
            ),
            2 * qkv.nbytes,
        )

    def _norm(self, rows: int) -> KernelCase:
        hidden = self._sizes.hidden
        norm = RMSNorm(hidden, 1e-5).to(self._device, self._sizes.dtype)
        residual, added = torch.randn(rows, hidden, device=self._device), self._draw(rows, hidden)
        return KernelCase(
            "add and norm",
            f"{rows} x {hidden}",
            lambda: add_and_norm(residual, added, norm, 1.0),
            2 * residual.nbytes + 2 * added.nbytes,
        )

    def _gate(self, rows: int) -> KernelCase:
        x = self._draw(rows, 2 * self._sizes.inner)
        return KernelCase(
            "gate and up",
            f"{rows} x {self._sizes.inner}",
            lambda: gate_up(x, Activation.SILU),
            x.nbytes + x.nbytes // 2,
        )

    def _sampling(self) -> Iterator[KernelCase]:
        drawn = {"greedy": (0.0, 0, 1.0), "top_p 0.9": (0.8, 0, 0.9), "top_k 50": (0.8, 50, 1.0)}
        rows_of = [rows for rows in self._sizes.rows if rows <= MAX_SAMPLING_ROWS]
        for rows, (name, (temperature, top_k, top_p)) in product(rows_of, drawn.items()):
            table = SlotTable(rows, PAGE_SIZE, 1, PAGE_SIZE, self._device)
            table.sampling.temperature.fill_(temperature)
            table.sampling.top_k.fill_(top_k)
            table.sampling.top_p.fill_(top_p)
            logits = 3 * self._draw(rows, self._sizes.vocab)
            slots = torch.arange(rows, device=self._device)
            yield KernelCase(
                "choice of a token",
                f"{rows} x {self._sizes.vocab}, {name}",
                _choice(logits, slots, table),
                logits.nbytes,
            )

    def _product(self, rows: int) -> KernelCase:
        hidden = self._sizes.hidden
        x, weight = self._draw(rows, hidden), self._draw(hidden, hidden)
        return KernelCase(
            "deterministic product",
            f"{rows} x {hidden} x {hidden}",
            lambda: multiply(x, weight),
            weight.nbytes + 2 * x.nbytes,
            2 * rows * hidden * hidden,
            "cuBLAS" if weight.is_cuda else "torch",
            lambda: F.linear(x, weight),
        )


def _choice(logits: Tensor, slots: Tensor, table: SlotTable) -> Call:
    positions = torch.zeros_like(slots)
    return lambda: sample_tokens(logits, slots, positions, table.sampling, table.tokens)
