"""Each Triton kernel against plain torch, over random shapes and pages."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.triton_device import DEVICE  # isort: skip (before what it has to precede)

from quadriga.server.models.families.decoder_config import RopeScaling
from tests import EVERYTHING
from worker_proc.gpu import pages
from worker_proc.gpu.kernels.attention import attend_over_pages, queries_of_block, rotate_and_write
from worker_proc.gpu.kernels.matmul import multiply
from worker_proc.gpu.kernels.rows import activate_, add_and_norm, embed, gate_up, norm_and_add
from worker_proc.gpu.pages import Pages, TritonAttention
from worker_proc.models.attention import AttentionShape
from worker_proc.models.decoder import rope_frequencies
from worker_proc.models.layers import (
    Activation,
    Attention,
    Embedding,
    LayerNorm,
    QKNorms,
    RMSNorm,
    Rope,
    activate,
    cap,
)
from worker_proc.models.layers import gate_up as gate_up_in_torch
from worker_proc.step.slot_table import SlotTable

FLOAT32, BFLOAT16 = torch.float32, torch.bfloat16
TOLERANCE = {FLOAT32: 1e-5, BFLOAT16: 1e-2}
"""Of the norm: sums are added in another order, and bfloat16 keeps 8 bits."""
SLOTS, CONTEXT = 5, 128


@pytest.mark.skipif(DEVICE.type == "cuda", reason="is about the interpreter on a CPU")
def test_the_interpreter_counts_up_to_an_array_of_one_element() -> None:
    from triton.runtime import interpreter

    tensor = type("FakeTensor", (), {"handle": SimpleNamespace(data=np.array([7]))})
    interpreter._patch_lang_tensor(tensor, SimpleNamespace(set_attr=setattr))
    assert list(range(5, tensor())) == [5, 6]


def close(ours: Tensor, theirs: Tensor, dtype: torch.dtype) -> bool:
    difference = (ours.float() - theirs.float()).norm() / theirs.float().norm().clamp(min=1e-9)
    return bool(difference <= TOLERANCE[dtype])


def draw(*size: int, dtype: torch.dtype = FLOAT32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(size))
    return torch.randn(*size, generator=generator).to(DEVICE, dtype)


def ints(values: list[int] | list[list[int]]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device=DEVICE)


@dataclass
class Case:
    """Heads, and rows of (slot, tokens computed, tokens now) over pages in random places."""

    heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    rows: list[tuple[int, int, int]]

    @property
    def tokens(self) -> int:
        return sum(count for _, _, count in self.rows)

    def page_table(self) -> Tensor:
        """Of a pool with one spare page at its end."""
        pages = list(range(SLOTS * CONTEXT // self.page_size))
        random.Random(1).shuffle(pages)
        return ints(pages).view(SLOTS, -1)

    def pool(self, dtype: torch.dtype) -> Tensor:
        pages = SLOTS * CONTEXT // self.page_size + 1
        return draw(2, pages, self.page_size, self.kv_heads, self.head_dim, dtype=dtype)

    def blocks(self) -> Tensor:
        """[4, blocks]: slot, first position, first token, queries of each."""
        most = queries_of_block(self.heads // self.kv_heads, self.head_dim, FLOAT32)
        blocks, token = [], 0
        for slot, computed, count in self.rows:
            for begin in range(0, count, most):
                blocks.append([slot, computed + begin, token + begin, min(most, count - begin)])
            token += count
        return ints(blocks).t().contiguous()

    def expected(self, q: Tensor, pool: Tensor, attention: Attention) -> Tensor:
        """Row by row, in float32: scores, soft cap, mask, softmax with sinks."""
        table, parts, token = self.page_table(), [], 0
        for slot, computed, count in self.rows:
            length = computed + count
            k, v = (
                x.float()[table[slot]].flatten(0, 1)[:length].transpose(0, 1)
                for x in (pool[0], pool[1])
            )
            k, v = (x.repeat_interleave(self.heads // self.kv_heads, 0) for x in (k, v))
            query = q[token : token + count].float().transpose(0, 1)
            scores = cap(query @ k.transpose(1, 2) * attention.scale, attention.softcap)
            mask = torch.ones(count, length, dtype=torch.bool, device=DEVICE).tril(computed)
            if attention.window is not None:
                mask = mask.triu(computed + 1 - attention.window)
            scores = scores.masked_fill(~mask, float("-inf"))
            if attention.sinks is not None:
                sinks = attention.sinks.float()[:, None, None].expand(-1, count, 1)
                scores = torch.cat((scores, sinks), -1)
            out = scores.softmax(-1)[..., :length] @ v
            parts.append(out.transpose(0, 1).flatten(1))
            token += count
        return torch.cat(parts)

    def plain(self) -> Attention:
        return Attention(self.head_dim**-0.5)

    def special(self, window: int, dtype: torch.dtype) -> Attention:
        """A scale, a soft cap, a window and sinks."""
        sinks = draw(self.heads, dtype=dtype, seed=7)
        return Attention(0.4, softcap=2.5, window=window, sinks=sinks)


MIXED = [
    Case(4, 4, 12, 4, [(0, 3, 1), (3, 0, 9), (1, 50, 70)]),
    Case(6, 2, 16, 16, [(2, 0, 1), (4, 127, 1), (0, 0, 100)]),
    Case(9, 3, 64, 1, [(1, 5, 5), (2, 64, 64)]),
    Case(8, 1, 24, 32, [(0, 63, 2), (1, 0, 66)]),
    Case(2, 1, 160, 16, [(0, 20, 21), (3, 40, 1)]),
]
DECODE = [
    Case(4, 4, 12, 4, [(0, 3, 1), (3, 0, 1), (1, 64, 1)]),
    Case(9, 3, 64, 16, [(2, 120, 1), (4, 127, 1)]),
    Case(20, 1, 16, 1, [(0, 63, 1)]),
]


PROMPT_KINDS = [(FLOAT32, None), (BFLOAT16, None), (BFLOAT16, 30), (FLOAT32, 1)]
DECODE_KINDS = [(BFLOAT16, 1, None), (FLOAT32, 4, None), (BFLOAT16, 4, 3), (FLOAT32, 1, 70),
                (FLOAT32, 4, 70)]  # fmt: skip


def paired(
    cases: Sequence[object], kinds: Sequence[tuple[object, ...]]
) -> list[tuple[object, ...]]:
    """Return each case with every second kind, or with all kinds."""
    return [
        (case, *kind)
        for (row, case), (column, kind) in product(enumerate(cases), enumerate(kinds))
        if EVERYTHING or (row + column) % 2 == 0
    ]


@pytest.mark.parametrize(("case", "dtype", "window"), paired(MIXED, PROMPT_KINDS), ids=str)
def test_prompts_chunks_and_decode_rows_attend_to_their_pages(
    case: Case, dtype: torch.dtype, window: int | None
) -> None:
    attention = case.plain() if window is None else case.special(window, dtype)
    q, pool = draw(case.tokens, case.heads, case.head_dim, dtype=dtype), case.pool(dtype)
    out = q.new_full((case.tokens, case.heads * case.head_dim), float("nan"))
    attend_over_pages(q, pool, case.page_table(), case.blocks(), out, attention)
    assert close(out, case.expected(q, pool, attention), dtype)


@pytest.mark.parametrize(
    ("case", "dtype", "splits", "window"), paired(DECODE, DECODE_KINDS), ids=str
)
def test_decode_rows_attend_alike_however_their_keys_are_split(
    case: Case, dtype: torch.dtype, splits: int, window: int | None
) -> None:
    attention = case.plain() if window is None else case.special(window, dtype)
    q, pool = draw(case.tokens, case.heads, case.head_dim, dtype=dtype), case.pool(dtype)
    out = q.new_full((case.tokens + 1, case.heads * case.head_dim), float("nan"))
    rows = [*((slot, computed) for slot, computed, _ in case.rows), (-1, 0)]
    blocks = ints([list(row) for row in rows]).t().contiguous()
    padded = torch.cat((q, q[:1]))
    attend_over_pages(padded, pool, case.page_table(), blocks, out, attention, splits)
    assert close(out[:-1], case.expected(q, pool, attention), dtype)
    assert out[-1].eq(0).all(), "a row that stands for nothing gives zeros"


@pytest.mark.parametrize(
    ("sizes", "rotated", "is_normed", "dtype", "splits", "window"),
    [
        ((4, 4, 12), 1.0, True, FLOAT32, 4, None),
        ((6, 2, 16), 0.5, False, FLOAT32, 1, 9),
        ((6, 2, 24), 0.5, True, BFLOAT16, 1, None),
        ((6, 2, 16), None, False, BFLOAT16, 4, 9),
    ],
)
def test_rows_that_decode_write_their_keys_as_the_kernel_before_does(
    sizes: tuple[int, int, int],
    rotated: float | None,
    is_normed: bool,
    dtype: torch.dtype,
    splits: int,
    window: int | None,
) -> None:
    heads, kv_heads, dim = sizes
    case = Case(heads, kv_heads, dim, 4, [])
    slots, positions = ints([3, -1, 0, 1]), ints([17, 0, 0, 64])
    qkv, table = draw(4, heads + 2 * kv_heads, dim, dtype=dtype), case.page_table()
    attention = case.plain() if window is None else case.special(window, dtype)
    if is_normed:
        norms = attention.norms = QKNorms(dim, dim, 1e-5, offset=0.5).to(DEVICE, dtype)
        norms.queries.weight.copy_(draw(dim, seed=1))
        norms.keys.weight.copy_(draw(dim, seed=2))
    if rotated is not None:
        frequencies = 100.0 ** -torch.arange(0, 1, 2 / (dim * rotated))
        attention.rope = Rope(frequencies, CONTEXT, DEVICE, attention_factor=1.2)
    results = []
    for writes in (False, True):
        q, pool, out = qkv.clone(), case.pool(dtype), qkv.new_empty(4, heads * dim)
        pool[1, table[1, 64 // 4], 64 % 4, 0, 0] = 1.0
        nonfinite_from = torch.full((SLOTS,), 1 << 40, device=DEVICE)
        q[3, -1, 3] = float("inf")
        if not writes:
            rotate_and_write(q, pool, table, slots, positions, attention, nonfinite_from, out)
        blocks = torch.stack((slots, positions))
        attend_over_pages(q[:, :heads], pool, table, blocks, out, attention, splits,
                          nonfinite_from if writes else None)  # fmt: skip
        results.append((out, pool, nonfinite_from))
    (expected, expected_pool, expected_from), (out, pool, nonfinite_from) = results
    assert nonfinite_from.equal(expected_from) and nonfinite_from[1] == 64
    assert close(out[:3], expected[:3], dtype) and out[1].eq(0).all()
    assert pool[torch.isinf(expected_pool)].isinf().all()
    finite = expected_pool.isfinite()
    assert close(pool[finite], expected_pool[finite], dtype)


@pytest.mark.parametrize("is_wrong", [False, True])
def test_keys_are_written_by_a_kernel_of_its_own_where_attention_writes_wrong_ones(
    is_wrong: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    shape = AttentionShape(1, 4, 2, 16)
    pool = Pages(shape, 8, 4, BFLOAT16, DEVICE)
    attention = TritonAttention(pool, BFLOAT16, deterministic=False)
    if is_wrong:
        monkeypatch.setattr(pages, "attend_over_pages", lambda q, pool, table, blocks, out, *_:
                            out.fill_(1.0 if _[-1] is None else 0.5))  # fmt: skip
    attention.check_writing([Case(4, 2, 16, 4, []).plain()])
    slots = ints([0])
    table = SlotTable(1, 16, 8, 4, DEVICE)
    launch = attention.plan_decode(table, slots, slots, False).launches[0]
    assert launch.can_write(Attention(1.0)) is not is_wrong
    assert [record.levelname for record in caplog.records] == ["WARNING"] * is_wrong


@pytest.mark.parametrize("window", [None, 20])
def test_a_query_attends_alike_whatever_chunk_it_comes_in(window: int | None) -> None:
    whole = Case(6, 2, 16, 4, [(2, 0, 50)])
    q, pool, table = draw(50, 6, 16), whole.pool(FLOAT32), whole.page_table()
    out = torch.empty(50, 96, device=DEVICE)
    attention = whole.plain() if window is None else whole.special(window, FLOAT32)
    attend_over_pages(q, pool, table, whole.blocks(), out, attention)
    for begin, end in ((0, 19), (19, 20), (20, 50)):
        part = Case(6, 2, 16, 4, [(2, begin, end - begin)])
        chunk = torch.empty(end - begin, 96, device=DEVICE)
        attend_over_pages(q[begin:end], pool, table, part.blocks(), chunk, attention)
        assert chunk.equal(out[begin:end])


@pytest.mark.parametrize(
    ("sizes", "rotated", "normed", "dtype"),
    paired(
        [(4, 4, 12), (6, 2, 16)],
        list(product([None, 0.5, 1.0], [None, "heads", "whole"], TOLERANCE)),
    ),
    ids=str,
)
def test_positions_are_applied_and_keys_and_values_lie_in_their_pages(
    sizes: tuple[int, int, int], rotated: float | None, normed: str | None, dtype: torch.dtype
) -> None:
    heads, kv_heads, dim = sizes
    case = Case(heads, kv_heads, dim, 4, [])
    slots, positions = ints([3, -1, 0, 3]), ints([17, 5, 0, 18])
    qkv, pool = draw(4, heads + 2 * kv_heads, dim, dtype=dtype), case.pool(dtype)
    expected, expected_pool = qkv.float().clone(), pool.clone()
    attention, turning = case.plain(), expected[:, : heads + kv_heads]
    if normed is not None:
        widths = (dim, dim) if normed == "heads" else (heads * dim, kv_heads * dim)
        norms = QKNorms(*widths, 1e-5, offset=0.5, whole=normed == "whole").to(DEVICE, dtype)
        attention.norms = norms
        for part, norm in ((turning[:, :heads], norms.queries), (turning[:, heads:], norms.keys)):
            norm.weight.copy_(draw(len(norm.weight), seed=part.shape[1]))
            wide = part.flatten(1) if norms.whole else part
            gain = norm.weight.float() + 0.5
            part.copy_(F.rms_norm(wide, gain.shape, gain, 1e-5).view_as(part))
    if rotated is not None:
        values = {"rope_theta": 100.0, "partial_rotary_factor": rotated}
        frequencies, _ = rope_frequencies(RopeScaling.from_hf(values, dim, rotated != 1.0), CONTEXT)
        rope = attention.rope = Rope(frequencies, CONTEXT, DEVICE, attention_factor=1.2)
        cosines, sines = (x[positions].unsqueeze(1) for x in (rope.cosines, rope.sines))
        assert 2 * len(frequencies) == int(rotated * dim)
        first, second = turning[..., : 2 * len(frequencies)].chunk(2, -1)
        turned = torch.cat((first * cosines - second * sines, second * cosines + first * sines), -1)
        turning[..., : 2 * len(frequencies)] = turned
    pages = case.page_table()[slots, positions // 4]
    for row in (0, 2, 3):
        kv = expected[row, heads:].to(dtype).unflatten(0, (2, kv_heads))
        expected_pool[:, pages[row], positions[row] % 4] = kv
    nonfinite_from = torch.full((len(case.page_table()),), 1 << 40, device=qkv.device)
    out = qkv.new_full((len(qkv), heads * dim), float("nan"))
    rotate_and_write(qkv, pool, case.page_table(), slots, positions, attention, nonfinite_from, out)
    assert (nonfinite_from == 1 << 40).all()
    assert (out[1] == 0).all(), "the row of padding"
    real = [0, 2, 3]
    assert close(qkv[real, :heads], expected[real, :heads], dtype)
    assert close(pool, expected_pool, dtype)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("kind", [LayerNorm, RMSNorm])
@pytest.mark.parametrize("adding", [True, False])
def test_the_residual_is_added_to_and_normalized(
    kind: type, adding: bool, dtype: torch.dtype
) -> None:
    norm = kind(100, 1e-5).to(DEVICE, dtype)
    norm.weight.copy_(draw(100))
    if kind is LayerNorm:
        norm.bias.copy_(draw(100, seed=1))
    residual, added = draw(3, 100), draw(3, 100, dtype=dtype, seed=2) if adding else None
    expected = residual + (0.7 * added.float() if added is not None else 0.0)
    weight = norm.weight.float()
    if isinstance(norm, RMSNorm):
        norm.offset = 1.0
        weight = weight + 1.0
    normed = add_and_norm(residual, added, norm, 0.7)
    reference = (
        F.layer_norm(expected, (100,), weight, norm.bias.float(), 1e-5)
        if kind is LayerNorm
        else F.rms_norm(expected, (100,), weight, 1e-5)
    )
    assert normed.dtype == dtype
    assert close(residual, expected, FLOAT32)
    assert close(normed, reference, dtype)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_a_normalized_value_is_added_to_the_residual(dtype: torch.dtype) -> None:
    norm = RMSNorm(100, 1e-5, offset=1.0).to(DEVICE, dtype)
    norm.weight.copy_(draw(100))
    residual, x = draw(3, 100), draw(3, 100, dtype=dtype, seed=2)
    expected = residual + F.rms_norm(x.float(), (100,), norm.weight.float() + 1.0, 1e-5)
    norm_and_add(residual, norm, x)
    assert close(residual, expected, FLOAT32)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("activation", Activation)
def test_activations(activation: Activation, dtype: torch.dtype) -> None:
    x = 6 * draw(5, 300, dtype=dtype)
    assert close(gate_up(x, activation), gate_up_in_torch(activation, x.float()), dtype)
    if activation is not Activation.CLAMPED_SWIGLU:
        assert close(activate_(x.clone(), activation), activate(activation, x.float()), dtype)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("with_positions", [True, False])
def test_embedding_looks_up_what_is_known_of_a_slot(
    with_positions: bool, dtype: torch.dtype
) -> None:
    tokens, places = Embedding(50, 100).to(DEVICE, dtype), Embedding(10, 100, 2).to(DEVICE, dtype)
    tokens.weight.copy_(draw(50, 100))
    places.weight.copy_(draw(10, 100))
    known = torch.arange(24, device=DEVICE, dtype=torch.int32).view(3, 8)
    slots, positions = ints([2, 0, -1]), ints([1, 7, 0])
    x = embed(known, slots, positions, tokens, places if with_positions else None, 3.0)
    expected = 3.0 * tokens.weight[known[slots, positions]].float()
    if with_positions:
        expected += places.weight[positions + 2].float()
    assert close(x[:2], expected[:2], FLOAT32)
    assert x[2].eq(0).all()


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_a_product_by_itself_has_the_rows_that_it_has_among_others(dtype: torch.dtype) -> None:
    x, weight, bias = draw(37, 90, dtype=dtype), draw(70, 90, dtype=dtype), draw(70, dtype=dtype)
    product = multiply(x, weight, bias)
    assert close(product, F.linear(x.float(), weight.float(), bias.float()), dtype)
    for row in np.random.default_rng(0).choice(37, 3):
        assert multiply(x[row : row + 1], weight, bias).equal(product[row : row + 1])
