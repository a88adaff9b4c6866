"""Checkpoints of compressed-tensors, as LLM Compressor writes them.

https://github.com/vllm-project/compressed-tensors. Layers have weight_scale and, if not symmetric,
weight_zero_point, beside weight_packed (codes of 4 or 8 bits in int32, with the sign bit inverted)
and weight_shape, or beside weight (int8 or float8_e4m3fn).
"""

import torch
from torch import Tensor

from quadriga.model_files.quantized.scheme import WeightScheme
from worker_proc.loading.quantized.coded_rows import (
    CodedRows,
    CodeKind,
    LayerTensors,
    group_size_of,
    order_of,
    unpack_words,
)
from worker_proc.loading.quantized.scaled_floats import read_float8, rows_of_scales


def read_compressed_float(tensors: LayerTensors, scheme: WeightScheme) -> CodedRows:
    """Return the matrix of a layer in float8_e4m3fn."""
    return read_float8(tensors, scheme, "weight_scale")


def read_compressed_int(tensors: LayerTensors, scheme: WeightScheme) -> CodedRows:
    """Return the matrix of a layer in int8, which has values of 4 or 8 bits."""
    codes = tensors["weight"]
    if codes.dtype != torch.int8:
        raise tensors.unsupported("weight", codes.dtype, "int8")
    outputs, inputs = codes.shape
    scale = rows_of_scales(tensors["weight_scale"], scheme.block, outputs)
    zero = None
    if "weight_zero_point" in tensors:
        zero = rows_of_scales(tensors["weight_zero_point"], scheme.block, outputs)
    return _integers(tensors, scheme, (outputs, inputs), codes, scale, zero, 8)


def read_pack_quantized(tensors: LayerTensors, scheme: WeightScheme) -> CodedRows:
    """Return the matrix of a layer in packed integers."""
    packed, bits = tensors["weight_packed"], scheme.bits
    outputs, inputs = map(int, tensors["weight_shape"].tolist())
    if packed.shape[1] != -(-inputs * bits // 32):
        raise tensors.unsupported("weight_packed", list(packed.shape), f"{bits} bits of {inputs}")
    scale = rows_of_scales(tensors["weight_scale"], scheme.block, outputs)
    zero = None
    if "weight_zero_point" in tensors:
        zero = tensors["weight_zero_point"]
        if zero.dtype == torch.int32:  # packed along the outputs
            zero = unpack_words(zero.t(), bits)[:, :outputs].t() ^ _middle(bits)
            zero = _sign_extend(zero, bits)
        zero = rows_of_scales(zero, scheme.block, outputs)
    return _integers(tensors, scheme, (outputs, inputs), packed, scale, zero, bits)


def _integers(
    tensors: LayerTensors,
    scheme: WeightScheme,
    shape: tuple[int, int],
    stored: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    bits: int,
) -> CodedRows:
    """Return integers around `zero`, int8 [outputs, groups]; None: around 0."""
    inputs, middle = shape[1], _middle(bits)
    group_size = group_size_of(inputs, scheme.group_size)
    if scheme.block is not None:
        group_size = scheme.block[1]
    if zero is None:
        zero = torch.zeros(scale.shape, dtype=torch.int8)
    order = None
    if "weight_g_idx" in tensors and bool((tensors["weight_g_idx"] >= 0).all()):
        order = order_of(tensors["weight_g_idx"], group_size, tensors)

    def unpack() -> Tensor:
        if stored.dtype == torch.int8:
            codes = stored.contiguous().view(torch.uint8) ^ middle
        else:
            codes = unpack_words(stored, bits)[:, :inputs]
        return codes if order is None else codes[:, order]

    return CodedRows(
        CodeKind.INT4 if bits == 4 else CodeKind.INT8,
        shape,
        group_size,
        unpack,
        scale=scale,
        zero=(zero.to(torch.int16) + middle).to(torch.uint8),
        order=order,
        stored_bytes=tensors.num_bytes,
    )


def _middle(bits: int) -> int:
    """Return the code of zero: codes of files are signed, and those in memory are not."""
    return 1 << (bits - 1)


def _sign_extend(codes: Tensor, bits: int) -> Tensor:
    """Convert uint8 of two's complement in `bits` to int8."""
    return (codes << (8 - bits)).view(torch.int8) >> (8 - bits)
