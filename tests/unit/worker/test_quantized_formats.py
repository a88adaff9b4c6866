"""Every block type of a GGUF is multiplied as it is stored, also beside others in one matrix."""

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as Kind
from gguf.quants import dequantize
from torch import Tensor

from quadriga.errors import ModelError
from quadriga.server.models.formats.quantization import BLOCK_SIZES
from tests.unit.worker.native_matrices import NativeMatrix
from tests.unit.worker.packed_matrices import HALVES, WIDTH, random_inputs, random_rows
from worker_proc.cpu import weights
from worker_proc.cpu.program import Format
from worker_proc.models.quantized_weights import GROUP, PackedRows

EXACT = 1e-5  # of the largest value: floats are added in another order


def values_of(*parts: PackedRows) -> Tensor:
    """Return the values of parts as the reference implementation decodes them."""
    return torch.cat([torch.from_numpy(dequantize(p.data.numpy(), Kind[p.kind])) for p in parts])


def rounded_inputs(x: Tensor) -> Tensor:
    """Return inputs as the kernels round them: 8 bits in groups of 32."""
    groups = x.unflatten(1, (-1, GROUP))
    largest = groups.abs().amax(-1, keepdim=True)
    # In float64, as a multiplication and an addition are rounded once.
    codes = (groups.double() * (127 / largest).double()).round().float()
    return (codes * (largest / 127)).flatten(1)


def assert_close(values: Tensor, expected: Tensor) -> None:
    assert (values - expected).abs().max() <= EXACT * expected.abs().max()


@pytest.mark.parametrize("kind", BLOCK_SIZES)
def test_a_type_has_the_reference_values_in_torch_and_in_the_kernels(kind: str) -> None:
    rows = random_rows(kind, 37)
    expected = values_of(rows)
    assert rows.shape == expected.shape
    assert torch.equal(rows.dense(), expected)
    assert torch.equal(NativeMatrix([rows]).look_up(), expected)


@pytest.mark.parametrize("kind", BLOCK_SIZES)
def test_the_smallest_and_largest_exponents_and_codes_are_exact(kind: str) -> None:
    size = BLOCK_SIZES[kind]
    for fill in (0, 255):
        data = np.full((16, 256 // size.weights, size.num_bytes), fill, np.uint8)
        for at in HALVES.get(kind, (0,)):
            data[..., at : at + 2] = np.array([6e-8], np.float16).view(np.uint8)
        if kind == "MXFP4":
            data[:, :, 0] = np.arange(data[0, :, 0].size) * (1 if fill == 0 else 36)
        rows = PackedRows(kind, torch.from_numpy(data.reshape(16, -1)))
        assert torch.equal(NativeMatrix([rows]).look_up(), values_of(rows))


@pytest.mark.parametrize("kind", BLOCK_SIZES)
@pytest.mark.parametrize("count", [1, 3, 8, 33])
def test_products_are_those_of_the_values_with_inputs_of_8_bits(kind: str, count: int) -> None:
    rows = random_rows(kind, 72)
    x = random_inputs(count)
    product = NativeMatrix([rows]).multiply(x, threads=2)[:, :72]
    exact = rounded_inputs(x).double() @ values_of(rows).double().T
    assert_close(product, exact.float())


@pytest.mark.parametrize("kind", BLOCK_SIZES)
def test_a_matrix_takes_the_bytes_of_the_file(kind: str) -> None:
    rows = random_rows(kind, 64, 1024)
    assert GGML_QUANT_SIZES[Kind[kind]] == BLOCK_SIZES[kind]
    assert 1 <= NativeMatrix([rows]).num_bytes / rows.data.numel() <= 1.05


# Fused rows: those of Q4_K_M, odd numbers of panels, and neighbours of the same type.
MIXTURES = [
    (("Q4_K", 64), ("Q4_K", 16), ("Q6_K", 16)),
    (("Q8_0", 48), ("Q5_0", 16), ("Q2_K", 40)),
    (("Q4_0", 16), ("MXFP4", 16), ("MXFP4", 16), ("IQ4_XS", 32), ("Q3_K", 9)),
]


@pytest.mark.parametrize("mixture", MIXTURES)
@pytest.mark.parametrize("count", [1, 6])
def test_a_fused_matrix_keeps_the_type_of_each_part(
    mixture: tuple[tuple[str, int], ...], count: int
) -> None:
    parts = [random_rows(kind, size, seed=i) for i, (kind, size) in enumerate(mixture)]
    matrix = NativeMatrix(parts)
    expected = values_of(*parts)
    assert matrix.matrix.format == Format.MIXED
    assert torch.equal(matrix.look_up(), expected)
    padded = -matrix.outputs % 16 / matrix.outputs
    assert matrix.num_bytes <= (1.05 + padded) * sum(part.data.numel() for part in parts)
    x = random_inputs(count)
    product = matrix.multiply(x, threads=2)[:, : matrix.outputs]
    assert_close(product, rounded_inputs(x) @ expected.T)


@pytest.mark.parametrize("kinds", [("Q4_K", "Q4_K"), ("Q4_K", "Q6_K"), ("Q5_0", "Q8_0")])
@pytest.mark.parametrize("size", [48, 56])
def test_gate_and_up_may_have_different_types(kinds: tuple[str, str], size: int) -> None:
    gate, up = (random_rows(kind, size, seed=i) for i, kind in enumerate(kinds))
    x = random_inputs(5)
    product = NativeMatrix([gate, up], gated=True).multiply(x)[:, :size]
    rounded = rounded_inputs(x)
    gates = rounded @ values_of(gate).T
    assert_close(product, torch.nn.functional.silu(gates) * (rounded @ values_of(up).T))


def test_rows_of_two_types_in_one_panel_are_refused_with_what_to_take_instead() -> None:
    rows = random_rows("Q4_K", 24)
    parts = [PackedRows(rows.kind, rows.data, "a.gguf: attn_q"), random_rows("Q6_K", 24)]
    message = r"^a\.gguf: attn_q has 24 rows in Q4_K before rows in Q6_K.*--quantization int8"
    with pytest.raises(ModelError, match=message):
        NativeMatrix(parts)


def test_large_matrices_are_packed_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "CHUNK_WEIGHTS", 40 * WIDTH)
    for parts in (["Q5_K"], ["Q5_K", "Q8_0"]):
        rows = [random_rows(kind, 112) for kind in parts]
        assert torch.equal(NativeMatrix(rows).look_up(), values_of(*rows))
