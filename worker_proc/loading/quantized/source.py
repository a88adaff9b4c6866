"""Read a quantized checkpoint layer by layer, from the files that hold the layer's tensors."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torch import Tensor

from quadriga.errors import ModelError
from quadriga.model_files.quantized.scheme import CheckpointQuantization, WeightScheme
from worker_proc.loading.quantized.awq import read_awq
from worker_proc.loading.quantized.bitsandbytes import read_bitsandbytes
from worker_proc.loading.quantized.coded_rows import CodedRows, LayerTensors
from worker_proc.loading.quantized.compressed_tensors import (
    read_compressed_float,
    read_compressed_int,
    read_pack_quantized,
)
from worker_proc.loading.quantized.gptq import read_gptq
from worker_proc.loading.quantized.scaled_floats import read_fp8

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
    files: list[Path], quantization: CheckpointQuantization, location: str
) -> QuantizedTensors:
    """Yield every tensor; a quantized layer as the tensor `weight`, in CodedRows.

    Args:
        files: The *.safetensors.
        quantization: What config.json says.
        location: Of the checkpoint, for errors.

    Raises:
        ModelError: A file cannot be read, or a layer's tensors do not fit together.
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
            if name not in parts and not name.endswith(IGNORED_SUFFIXES):
                yield name, handle.get_tensor(name)
        for layer, names in layers.items():
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
