"""Read the quantized layers of safetensors checkpoints: one reader for each method.

What all readers need; GPTQ, AWQ, bitsandbytes, float8 with scales, compressed-tensors; then
`from_quantized`, which reads a checkpoint layer by layer.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quadriga.errors import ModelError
from quadriga.server.models.formats.quantization import (
    WHOLE_ROW,
    CheckpointQuantization,
    WeightScheme,
)
from worker_proc.loading.checkpoints import IsWanted, every_tensor
from worker_proc.models.quantized_weights import CodedRows, CodeKind


class LayerTensors:
    """The tensors of a quantized layer, by the last part of their names."""

    def __init__(self, layer: str, location: str, tensors: Mapping[str, Tensor]) -> None:
        self.layer = layer
        self._location = location
        self._tensors = tensors

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._tensors:
            raise self.error(f"lacks the tensor {self.layer}.{name}; fetch the checkpoint again")
        return self._tensors[name]

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all tensors."""
        return tuple(self._tensors)

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self._tensors.values())

    def error(self, text: str) -> ModelError:
        """Return an error that begins with the location of the checkpoint."""
        return ModelError(f"{self._location} {text}")

    def unsupported(self, name: str, value: object, supported: str) -> ModelError:
        """Return an error for a tensor that has an unsupported property."""
        return self.error(
            f"has the tensor {self.layer}.{name} with {value}; supported: {supported}; take another"
            " checkpoint of the model"
        )


def group_size_of(inputs: int, group_size: int) -> int:
    """Return the columns that share a scale; WHOLE_ROW stands for all."""
    return inputs if group_size == WHOLE_ROW else group_size


def order_of(groups: Tensor, group_size: int, tensors: LayerTensors) -> Tensor | None:
    """Return the order in which the inputs of each group are neighbours; None: they are already.

    Args:
        groups: [inputs] the group of each input.
        group_size: inputs of a group.
        tensors: the layer, for an error.
    """
    expected = torch.arange(len(groups)) // group_size
    if torch.equal(groups.long(), expected):
        return None
    order = torch.argsort(groups, stable=True)
    if not torch.equal(groups[order].long(), expected):
        raise tensors.unsupported("g_idx", "groups of unequal sizes", f"groups of {group_size}")
    return order


def unpack_nibbles(packed: Tensor) -> Tensor:
    """Unpack 8 codes of 4 bits from each int32, the lowest first: [rows, words] to uint8."""
    pairs = packed.contiguous().view(torch.uint8)
    return torch.stack((pairs & 15, pairs >> 4), -1).flatten(1)


def unpack_words(packed: Tensor, bits: int) -> Tensor:
    """Unpack codes of 4 or 8 bits from int32, the lowest first: [rows, words] to uint8."""
    return unpack_nibbles(packed) if bits == 4 else packed.contiguous().view(torch.uint8)


# GPTQ checkpoints, as GPTQModel and AutoGPTQ write them (Frantar et al. 2022, 2210.17323).
#
# qweight [inputs * bits / 32, outputs] int32 has the codes; qzeros [groups, outputs * bits / 32]
# int32 the zeros, in layout gptq less one; scales [groups, outputs]; g_idx [inputs] the group of
# each input.

# One in each code of an int32. A zero of 0 borrows from its neighbours when one is subtracted.
ONES = {4: 0x11111111, 8: 0x01010101}


def read_gptq(tensors: LayerTensors, scheme: WeightScheme) -> CodedRows:
    """Return the matrix of a layer."""
    bits, packed = scheme.bits, tensors["qweight"]
    inputs, outputs = packed.shape[0] * 32 // bits, packed.shape[1]
    group_size = group_size_of(inputs, scheme.group_size)
    zeros = tensors["qzeros"]
    if scheme.layout == "gptq":
        zeros = zeros + ONES[bits]
    order = order_of(tensors["g_idx"], group_size, tensors) if "g_idx" in tensors else None

    def decode(packed: Tensor) -> Tensor:
        codes = unpack_words(packed.t(), bits)
        return codes if order is None else codes[:, order]

    return CodedRows(
        CodeKind.INT4 if bits == 4 else CodeKind.INT8,
        (outputs, inputs),
        group_size,
        packed,
        decode,
        scale=tensors["scales"].t().contiguous(),
        zero=unpack_words(zeros, bits)[:, :outputs].t().contiguous(),
        order=order,
        stored_bytes=tensors.num_bytes,
    )


# AWQ checkpoints of version gemm, as AutoAWQ writes them (Lin et al. 2023, 2306.00978).
#
# qweight [inputs, outputs / 8] int32, qzeros [groups, outputs / 8] int32, scales [groups,
# outputs]. The 8 codes of an int32 are outputs 0, 2, 4, 6, 1, 3, 5, 7, the lowest first.

NIBBLE_OF_OUTPUT = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7])


def read_awq(tensors: LayerTensors, scheme: WeightScheme) -> CodedRows:
    """Return the matrix of a layer."""
    packed = tensors["qweight"]
    inputs, outputs = packed.shape[0], packed.shape[1] * 8
    return CodedRows(
        CodeKind.INT4,
        (outputs, inputs),
        group_size_of(inputs, scheme.group_size),
        packed,
        _unpack_awq,
        scale=tensors["scales"].t().contiguous(),
        zero=_unpack_awq(tensors["qzeros"]),
        stored_bytes=tensors.num_bytes,
    )


def _unpack_awq(packed: Tensor) -> Tensor:
    """Unpack [rows, words] int32 to [8 * words, rows] uint8."""
    nibbles = unpack_nibbles(packed).view(len(packed), -1, 8)
    return nibbles[:, :, NIBBLE_OF_OUTPUT].flatten(1).t().contiguous()


# Checkpoints of bitsandbytes (Dettmers et al. 2022, 2208.07339, and 2023, 2305.14314).
#
# 8 bits: weight [outputs, inputs] int8 and SCB [outputs], the largest magnitude of each output.
#
# 4 bits: weight [outputs * inputs / 2, 1] uint8, two codes a byte, the high half first;
# weight.quant_map [16], the values of the codes (nf4 or fp4); weight.absmax, the largest
# magnitude of each block; and weight.quant_state.bitsandbytes__*, JSON in bytes. With double
# quantization, absmax has codes of weight.nested_quant_map [256], times weight.nested_absmax,
# plus an offset.

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
        weight,
        lambda weight: weight.contiguous().view(torch.uint8) ^ 128,
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
        packed,
        lambda packed: _unpack_halves(packed, outputs, inputs),
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


def _unpack_halves(packed: Tensor, outputs: int, inputs: int) -> Tensor:
    pairs = packed.flatten()
    return torch.stack((pairs >> 4, pairs & 15), -1).flatten()[: outputs * inputs].view(outputs, -1)


# Checkpoints with weights in float8_e4m3fn: of method fp8, fbgemm_fp8 and compressed-tensors.
#
# weight [outputs, inputs] float8_e4m3fn, and weight_scale_inv or weight_scale, by which a weight
# is multiplied: for the whole matrix [] or [1], for each output [outputs, 1], or for each block
# of weight_block_size [output blocks, input blocks], as DeepSeek-V3
# (https://arxiv.org/abs/2412.19437).

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
        codes,
        lambda codes: codes,
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


# Checkpoints of compressed-tensors, as LLM Compressor writes them.
#
# https://github.com/vllm-project/compressed-tensors. Layers have weight_scale and, if not
# symmetric, weight_zero_point, beside weight_packed (codes of 4 or 8 bits in int32, with the sign
# bit inverted) and weight_shape, or beside weight (int8 or float8_e4m3fn).


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

    def decode(stored: Tensor) -> Tensor:
        if stored.dtype == torch.int8:
            codes = stored.contiguous().view(torch.uint8) ^ middle
        else:
            codes = unpack_words(stored, bits)[:, :inputs]
        return codes if order is None else codes[:, order]

    return CodedRows(
        CodeKind.INT4 if bits == 4 else CodeKind.INT8,
        shape,
        group_size,
        stored,
        decode,
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


READERS: dict[str, Callable[[LayerTensors, WeightScheme], CodedRows]] = {
    "gptq": read_gptq,
    "gptq_v2": read_gptq,
    "awq": read_awq,
    "bitsandbytes": read_bitsandbytes,
    "fp8": read_fp8,
    "pack-quantized": read_pack_quantized,
    "int": read_compressed_int,
    "float": read_compressed_float,
}
QuantizedTensors = Iterator[tuple[str, Tensor | CodedRows]]

# A layer with one of these tensors is quantized; the others of its tensors are parts of it.
MARKS = ("qweight", "weight_packed", "weight_scale", "weight_scale_inv", "SCB", "weight.absmax")
# Kept as they are, also in a quantized layer.
DENSE_PARTS = ("bias",)
# Scales of activations and of the KV cache, which are computed in the server's own formats.
IGNORED_SUFFIXES = (".input_scale", ".output_scale", ".activation_scale", ".input_zero_point",
                    ".output_zero_point", ".q_scale", ".k_scale", ".v_scale", ".k_zero_point",
                    ".v_zero_point", ".input_global_scale")  # fmt: skip


def from_quantized(
    files: list[Path],
    quantization: CheckpointQuantization,
    location: str,
    is_wanted: IsWanted = every_tensor,
) -> QuantizedTensors:
    """Yield the wanted tensors; a quantized layer as the tensor `weight`, in CodedRows.

    Args:
        files: the *.safetensors.
        quantization: what config.json says.
        location: of the checkpoint, for errors.
        is_wanted: returns whether a tensor is read.

    Raises:
        ModelError: a file cannot be read, or a layer's tensors do not fit together.
    """
    from safetensors import SafetensorError, safe_open

    with ExitStack() as opened:
        try:
            handles = [opened.enter_context(safe_open(file, framework="pt")) for file in files]
            handle_of = {name: handle for handle in handles for name in handle.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise ModelError(f"cannot read {location}: {error}; fetch it again") from None
        layers = quantized_layers(handle_of)
        parts = {f"{layer}.{part}" for layer, names in layers.items() for part in names}
        for name, handle in handle_of.items():
            if name not in parts and not name.endswith(IGNORED_SUFFIXES) and is_wanted(name):
                yield name, handle.get_tensor(name)
        for layer, names in layers.items():
            if not is_wanted(f"{layer}.weight"):
                continue
            tensors = {
                part: handle_of[f"{layer}.{part}"].get_tensor(f"{layer}.{part}") for part in names
            }
            yield f"{layer}.weight", _read(LayerTensors(layer, location, tensors), quantization)


def quantized_layers(names: dict[str, Any]) -> dict[str, list[str]]:
    """Return the parts of the quantized layers by the layers' names."""
    layers: dict[str, list[str]] = {
        name.removesuffix(f".{mark}"): []
        for name in names
        for mark in MARKS
        if name.endswith(f".{mark}")
    }
    for name in names:
        if name.endswith(IGNORED_SUFFIXES):
            continue
        layer = name
        while "." in layer:
            layer = layer.rpartition(".")[0]
            if layer in layers:
                part = name.removeprefix(f"{layer}.")
                if part not in DENSE_PARTS:
                    layers[layer].append(part)
                break
    return layers


def _read(tensors: LayerTensors, quantization: CheckpointQuantization) -> CodedRows:
    scheme = quantization.scheme_of(tensors.layer)
    if scheme is None:
        raise tensors.error(
            f"has the quantized layer {tensors.layer}, which no config_groups of config.json names"
        )
    rows = READERS[scheme.layout](tensors, scheme)
    expected = (rows.shape[0], -(-rows.shape[1] // rows.group_size))
    for name, values in (("scales", rows.scale), ("zeros", rows.zero)):
        if values is not None and tuple(values.shape) != expected:
            raise tensors.error(
                f"has {name} of shape {list(values.shape)} for {tensors.layer}, but config.json"
                f" asks for {list(expected)}; fetch the checkpoint again"
            )
    return rows
