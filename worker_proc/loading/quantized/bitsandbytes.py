"""Checkpoints of bitsandbytes (Dettmers et al. 2022, 2208.07339, and 2023, 2305.14314).

8 bits: weight [outputs, inputs] int8 and SCB [outputs], the largest magnitude of each output.

4 bits: weight [outputs * inputs / 2, 1] uint8, two codes a byte, the high half first;
weight.quant_map [16], the values of the codes (nf4 or fp4); weight.absmax, the largest magnitude of
each block; and weight.quant_state.bitsandbytes__*, JSON in bytes. With double quantization, absmax
has codes of weight.nested_quant_map [256], times weight.nested_absmax, plus an offset.
"""

import json
from typing import Any

import torch
from torch import Tensor

from quadriga.model_files.quantized.scheme import WeightScheme
from worker_proc.loading.quantized.coded_rows import CodedRows, CodeKind, LayerTensors

STATE = "weight.quant_state.bitsandbytes__"


def read_bitsandbytes(tensors: LayerTensors, _: WeightScheme) -> CodedRows:
    """Return the matrix of a layer."""
    return _read_8_bits(tensors) if "SCB" in tensors else _read_4_bits(tensors)


def _read_8_bits(tensors: LayerTensors) -> CodedRows:
    weight = tensors["weight"]
    if weight.dtype != torch.int8:
        raise tensors.unsupported("weight", weight.dtype, "int8")
    if "weight_format" in tensors and int(tensors["weight_format"]) != 0:
        raise tensors.unsupported("weight_format", int(tensors["weight_format"]), "0 (rows)")
    outputs, inputs = weight.shape
    scale = tensors["SCB"].float()[:, None] * (1 / 127)
    return CodedRows(
        CodeKind.INT8,
        (outputs, inputs),
        inputs,
        lambda: weight.contiguous().view(torch.uint8) ^ 128,
        scale=scale,
        zero=torch.full_like(scale, 128, dtype=torch.uint8),
        stored_bytes=tensors.num_bytes,
    )


def _read_4_bits(tensors: LayerTensors) -> CodedRows:
    packed, state = tensors["weight"], _state_of(tensors)
    if packed.dtype != torch.uint8:
        raise tensors.unsupported("weight", packed.dtype, "uint8")
    outputs, inputs = map(int, state["shape"])
    block = int(state["blocksize"])
    absmax = _absmax(tensors, state)
    if inputs % block:
        # A block has the end of one row and the begin of the next: each weight gets its own scale.
        absmax = absmax.repeat_interleave(block)[: outputs * inputs]
        block = 1
    return CodedRows(
        CodeKind.TABLE4,
        (outputs, inputs),
        block,
        lambda: _unpack(packed, outputs, inputs),
        scale=absmax.view(outputs, -1),
        table=tensors["weight.quant_map"].float(),
        stored_bytes=tensors.num_bytes,
    )


def _state_of(tensors: LayerTensors) -> dict[str, Any]:
    names = [name for name in tensors.names if name.startswith(STATE)]
    values = tensors[names[0] if names else STATE + "nf4"]
    state: dict[str, Any] = json.loads(bytes(values.tolist()))
    return state


def _absmax(tensors: LayerTensors, state: dict[str, Any]) -> Tensor:
    absmax = tensors["weight.absmax"]
    if "nested_blocksize" not in state:
        return absmax.float()
    scales = tensors["weight.nested_absmax"].repeat_interleave(int(state["nested_blocksize"]))
    values = tensors["weight.nested_quant_map"][absmax.int()] * scales[: len(absmax)]
    return values + float(state["nested_offset"])


def _unpack(packed: Tensor, outputs: int, inputs: int) -> Tensor:
    pairs = packed.flatten()
    return torch.stack((pairs >> 4, pairs & 15), -1).flatten()[: outputs * inputs].view(outputs, -1)
