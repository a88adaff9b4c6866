"""Checkpoints with weights in float8_e4m3fn: of method fp8, fbgemm_fp8 and compressed-tensors.

weight [outputs, inputs] float8_e4m3fn, and weight_scale_inv or weight_scale, by which a weight is
multiplied: for the whole matrix [] or [1], for each output [outputs, 1], or for each block of
weight_block_size [output blocks, input blocks], as DeepSeek-V3 (https://arxiv.org/abs/2412.19437).
"""

import torch
from torch import Tensor

from quadriga.model_files.quantized.scheme import WeightScheme
from worker_proc.loading.quantized.coded_rows import CodedRows, CodeKind, LayerTensors

NAN_CODE = 0x7F  # and 0xFF


def read_fp8(tensors: LayerTensors, scheme: WeightScheme) -> CodedRows:
    """Return the matrix of a layer."""
    name = "weight_scale_inv" if "weight_scale_inv" in tensors else "weight_scale"
    return read_float8(tensors, scheme, name)


def read_float8(tensors: LayerTensors, scheme: WeightScheme, scale_name: str) -> CodedRows:
    """Return a matrix of float8_e4m3fn with the scales of one tensor."""
    weight = tensors["weight"]
    if weight.dtype != torch.float8_e4m3fn or weight.dim() != 2:
        raise tensors.unsupported("weight", f"{weight.dtype} {list(weight.shape)}", "float8_e4m3fn")
    outputs, inputs = weight.shape
    scale = tensors[scale_name]
    if scale.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        scale = scale.float()  # powers of two in float8_e8m0fnu
    codes = weight.contiguous().view(torch.uint8)
    if bool(((codes & NAN_CODE) == NAN_CODE).any()):
        raise tensors.unsupported("weight", "values that are no numbers", "finite values")
    return CodedRows(
        CodeKind.FLOAT8,
        (outputs, inputs),
        scheme.block[1] if scheme.block else inputs,
        lambda: codes,
        scale=rows_of_scales(scale, scheme.block, outputs),
        stored_bytes=tensors.num_bytes,
    )


def rows_of_scales(values: Tensor, block: tuple[int, int] | None, outputs: int) -> Tensor:
    """Repeat the scales or zeros of a matrix, of rows or of blocks to [outputs, groups]."""
    if values.numel() == 1:
        values = values.reshape(1, 1)
    elif values.dim() == 1:
        values = values[:, None]
    if block is not None and values.shape[0] != outputs:
        values = values.repeat_interleave(block[0], 0)[:outputs]
    return values.expand(outputs, -1) if values.shape[0] == 1 else values
