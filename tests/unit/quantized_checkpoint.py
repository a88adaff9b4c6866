"""Writers of quantized checkpoints: each packs a tiny model as the documents of its method say.

They share no code with the readers. A writer returns the tensors of one layer and its values.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

LayerWriter = Callable[[Tensor], tuple[dict[str, Tensor], Tensor]]
# Of a Llama, and of Mixtral's experts.
PROJECTIONS = ("_proj.weight", ".w1.weight", ".w2.weight", ".w3.weight")


def quantize_checkpoint(
    directory: Path, write: LayerWriter, config: dict[str, Any], ignore: str = "lm_head"
) -> dict[str, Tensor]:
    """Quantize the projections of a Llama's directory in place.

    Returns:
        The values of all tensors of the dense checkpoint that it stands for.
    """
    file = directory / "model.safetensors"
    tensors: dict[str, Tensor] = {}
    values: dict[str, Tensor] = {}
    for name, tensor in load_file(file).items():
        if name.endswith(PROJECTIONS) and ignore not in name:
            parts, dense = write(tensor.float())
            layer = name.removesuffix(".weight")
            tensors |= {f"{layer}.{part}": t.contiguous() for part, t in parts.items()}
            values[name] = dense
        else:
            tensors[name] = values[name] = tensor
    save_file(tensors, file)
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": config}))
    return values


def integers(
    weight: Tensor, bits: int, group: int, symmetric: bool, dtype: torch.dtype = torch.float16
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Round to groups of integers.

    Returns:
        Codes [outputs, inputs] from 0, zeros and scales [outputs, groups], values.
    """
    group = weight.shape[1] if group == -1 else group
    grouped = weight.unflatten(1, (-1, group))
    top = 2**bits - 1
    if symmetric:
        scale = grouped.abs().amax(-1) * 2 / top
        zero = torch.full_like(scale, (top + 1) // 2)
    else:
        low, high = grouped.amin(-1).clamp(max=0), grouped.amax(-1).clamp(min=0)
        scale = (high - low) / top
        zero = (-low / scale).round().clamp(0, top)
    scale = scale.to(dtype)
    steps, middle = scale.float().unsqueeze(-1), zero.unsqueeze(-1)
    codes = (grouped / steps + middle).round().clamp(0, top)
    values = ((codes - middle) * steps).flatten(1)
    return codes.flatten(1).int(), zero.int(), scale, values


def pack(codes: Tensor, bits: int) -> Tensor:
    """Pack [rows, count] into int32 [rows, count * bits / 32], the lowest bits first."""
    per_word = 32 // bits
    words = np.zeros((codes.shape[0], -(-codes.shape[1] // per_word)), dtype=np.uint32)
    for i in range(codes.shape[1]):
        words[:, i // per_word] |= codes[:, i].numpy().astype(np.uint32) << (bits * (i % per_word))
    return torch.from_numpy(words.view(np.int32))


def gptq(
    bits: int, group: int, symmetric: bool = False, v2: bool = False, act_order: bool = False
) -> LayerWriter:
    """Write qweight, qzeros, scales and g_idx."""

    def write(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        inputs = weight.shape[1]
        size = inputs if group == -1 else group
        order = torch.randperm(inputs, generator=torch.Generator().manual_seed(inputs))
        order = order if act_order else torch.arange(inputs)
        codes, zero, scale, values = integers(weight[:, order], bits, size, symmetric)
        groups, restored, dense = torch.empty_like(order), codes.clone(), values.clone()
        groups[order] = torch.arange(inputs) // size
        restored[:, order], dense[:, order] = codes, values
        stored = pack(zero.t(), bits)
        if not v2:
            # One is subtracted from whole words: a zero of 0 borrows from its neighbour.
            ones = sum(1 << (bits * i) for i in range(32 // bits))
            stored = torch.from_numpy(stored.numpy().view(np.uint32) - np.uint32(ones))
            stored = stored.view(torch.int32)
        parts = {
            "qweight": pack(restored, bits).t(),
            "qzeros": stored,
            "scales": scale.t(),
            "g_idx": groups.int(),
        }
        return parts, dense

    return write


def awq(group: int) -> LayerWriter:
    """Write qweight, qzeros and scales of version gemm."""
    outputs_of_word = [0, 2, 4, 6, 1, 3, 5, 7]

    def interleaved(codes: Tensor) -> Tensor:
        return codes.unflatten(1, (-1, 8))[:, :, outputs_of_word].flatten(1)

    def write(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        codes, zero, scale, values = integers(weight, 4, group, symmetric=False)
        parts = {
            "qweight": pack(interleaved(codes.t()), 4),
            "qzeros": pack(interleaved(zero.t()), 4),
            "scales": scale.t(),
        }
        return parts, values

    return write


def pack_quantized(bits: int, group: int, symmetric: bool) -> LayerWriter:
    """Write weight_packed, weight_shape, weight_scale and weight_zero_point."""

    def write(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        codes, zero, scale, values = integers(weight, bits, group, symmetric, torch.bfloat16)
        parts = {
            "weight_packed": pack(codes, bits),
            "weight_shape": torch.tensor(weight.shape),
            "weight_scale": scale,
        }
        if not symmetric:
            parts["weight_zero_point"] = pack(zero.t(), bits).t()
        return parts, values

    return write


def int_quantized(group: int, symmetric: bool = True) -> LayerWriter:
    """Write weight in int8, weight_scale and weight_zero_point."""

    def write(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        codes, zero, scale, values = integers(weight, 8, group, symmetric, torch.float32)
        parts = {"weight": (codes - 128).to(torch.int8), "weight_scale": scale}
        if not symmetric:
            parts["weight_zero_point"] = (zero - 128).to(torch.int8)
        return parts, values

    return write


def float8(
    block: tuple[int, int] | None,
    name: str,
    per_row: bool = False,
    dtype: torch.dtype | None = None,
) -> LayerWriter:
    """Write weight in float8_e4m3fn, and scales of blocks, of rows or of the matrix."""

    def write(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        outputs, inputs = weight.shape
        height, width = block or ((1 if per_row else outputs), inputs)
        scales = torch.empty(-(-outputs // height), -(-inputs // width))
        codes, values = torch.empty_like(weight).to(torch.float8_e4m3fn), torch.empty_like(weight)
        for i in range(scales.shape[0]):
            for j in range(scales.shape[1]):
                place = slice(i * height, (i + 1) * height), slice(j * width, (j + 1) * width)
                scale = weight[place].abs().max() / 448
                scales[i, j] = scale = scale.to(dtype or torch.float32).float()
                codes[place] = (weight[place] / scale).to(torch.float8_e4m3fn)
                values[place] = codes[place].float() * scale
        stored = scales if block or per_row else scales.view(())
        parts = {"weight": codes, name: stored.to(dtype or torch.float32)}
        return parts | {"input_scale": torch.tensor(1.0)}, values

    return write


def bitsandbytes_int8(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Write weight in int8, SCB and weight_format."""
    largest = weight.abs().amax(1)
    codes = (weight * (127 / largest[:, None])).round()
    parts = {
        "weight": codes.to(torch.int8),
        "SCB": largest,
        "weight_format": torch.tensor(0, dtype=torch.uint8),
    }
    return parts, codes * (largest[:, None] * (1 / 127))


NF4 = [-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
       -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
       0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
       0.7229568362236023, 1.0]  # fmt: skip


def nf4(double: bool, block: int = 64) -> LayerWriter:
    """Write weight in nf4 with its quantization state."""

    def write(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        table, blocks = torch.tensor(NF4), weight.reshape(-1, block)
        absmax = blocks.abs().amax(1)
        codes = ((blocks / absmax[:, None])[..., None] - table).abs().argmin(-1)
        state: dict[str, Any] = {"quant_type": "nf4", "blocksize": block, "dtype": "float32"}
        state["shape"] = list(weight.shape)
        parts: dict[str, Tensor] = {}
        if double:
            nested = torch.linspace(-1, 1, 256)
            offset = float(absmax.mean())
            size = 256
            scales = torch.stack([part.max() for part in (absmax - offset).abs().split(size)])
            spread = scales.repeat_interleave(size)[: len(absmax)]
            small = (((absmax - offset) / spread)[:, None] - nested).abs().argmin(-1)
            absmax = nested[small] * spread + offset
            parts |= {"weight.nested_absmax": scales, "weight.nested_quant_map": nested}
            state |= {"nested_blocksize": size, "nested_dtype": "float32", "nested_offset": offset}
            parts["weight.absmax"] = small.to(torch.uint8)
        else:
            parts["weight.absmax"] = absmax
        flat = codes.flatten().to(torch.uint8)
        parts |= {
            "weight": (flat[::2] << 4 | flat[1::2])[:, None],
            "weight.quant_map": table,
            "weight.quant_state.bitsandbytes__nf4": torch.tensor(
                list(json.dumps(state).encode())
            ).to(torch.uint8),
        }
        return parts, (table[codes] * absmax[:, None]).view(weight.shape)

    return write


def weights(kind: str, bits: int, strategy: str, **fields: Any) -> dict[str, Any]:
    """Return the `weights` of a group of compressed-tensors."""
    return {"type": kind, "num_bits": bits, "strategy": strategy, **fields}


def compressed(layout: str, scheme: dict[str, Any]) -> dict[str, Any]:
    """Return a quantization_config of compressed-tensors with one group."""
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": scheme}},
    }


def gptq_config(bits: int, group: int, **fields: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": group, **fields}


AWQ_CONFIG = {"quant_method": "awq", "bits": 4, "version": "gemm", "zero_point": True}
NF4_CONFIG = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}

# Each format: how a layer is written, and the quantization_config.
FORMATS: dict[str, tuple[LayerWriter, dict[str, Any]]] = {
    "gptq 4 bits": (gptq(4, 32), gptq_config(4, 32)),
    "gptq 4 bits, symmetric, whole rows": (gptq(4, -1, True), gptq_config(4, -1)),
    "gptq 4 bits, act order": (gptq(4, 32, act_order=True), gptq_config(4, 32, desc_act=True)),
    "gptq 8 bits": (gptq(8, 32), gptq_config(8, 32)),
    "gptq 8 bits, symmetric, v2": (
        gptq(8, 32, True, v2=True),
        gptq_config(8, 32, checkpoint_format="gptq_v2"),
    ),
    "awq": (awq(32), AWQ_CONFIG | {"group_size": 32}),
    "awq, whole rows": (awq(-1), AWQ_CONFIG | {"group_size": -1}),
    "pack-quantized, groups": (
        pack_quantized(4, 32, True),
        compressed("pack-quantized", weights("int", 4, "group", group_size=32)),
    ),
    "pack-quantized, rows, with zeros": (
        pack_quantized(4, -1, False),
        compressed("pack-quantized", weights("int", 4, "channel", symmetric=False)),
    ),
    "pack-quantized, 8 bits": (
        pack_quantized(8, 32, False),
        compressed("pack-quantized", weights("int", 8, "group", group_size=32, symmetric=False)),
    ),
    "int-quantized": (
        int_quantized(-1),
        compressed("int-quantized", weights("int", 8, "channel", symmetric=True)),
    ),
    "int-quantized, with zeros": (
        int_quantized(-1, False),
        compressed("int-quantized", weights("int", 8, "channel", symmetric=False)),
    ),
    "float-quantized, matrix": (
        float8(None, "weight_scale"),
        compressed("float-quantized", weights("float", 8, "tensor")),
    ),
    "float-quantized, rows": (
        float8(None, "weight_scale", per_row=True, dtype=torch.bfloat16),
        compressed("float-quantized", weights("float", 8, "channel")),
    ),
    "float-quantized, blocks": (
        float8((32, 32), "weight_scale"),
        compressed("float-quantized", weights("float", 8, "block", block_structure=[32, 32])),
    ),
    "fp8, matrix": (float8(None, "weight_scale"), {"quant_method": "fp8"}),
    "fp8, blocks": (
        float8((64, 64), "weight_scale_inv"),
        {"quant_method": "fp8", "weight_block_size": [64, 64], "fmt": "e4m3"},
    ),
    "fbgemm_fp8": (
        float8(None, "weight_scale", per_row=True),
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0},
    ),
    "bitsandbytes 8 bits": (
        bitsandbytes_int8,
        {"quant_method": "bitsandbytes", "load_in_8bit": True},
    ),
    "nf4": (nf4(double=False, block=32), NF4_CONFIG),
    "nf4, double": (nf4(double=True, block=32), NF4_CONFIG | {"bnb_4bit_use_double_quant": True}),
}
