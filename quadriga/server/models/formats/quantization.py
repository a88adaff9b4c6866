"""How a quantized checkpoint stores its weights, read without torch.

First the scheme of a weight, then `quantization_config` of config.json for each method, then the
block types of GGUF that are multiplied as they are stored.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import msgspec

from quadriga.errors import ModelError

# Which layers are quantized is read from the tensors' names and dtypes, so that layers in
# `ignore` or `modules_to_not_convert` need no treatment of their own.

WHOLE_ROW = -1  # as a group size: all inputs of a row share a scale
# Tensors that belong to the weights of a layer and are no weights.
_FACTORS = (".scales", ".qzeros", ".g_idx", ".weight_g_idx", "_scale", ".weight_scale_inv",
            "_zero_point", ".weight_shape", ".SCB", ".weight_format")  # fmt: skip


@dataclass(frozen=True, slots=True)
class WeightScheme:
    """How the weights of some layers are stored.

    Attributes:
        layout: which tensors a layer has, such as gptq or pack-quantized.
        bits: bits of a weight.
        group_size: neighbouring inputs of a row that share a scale, or WHOLE_ROW.
        block: [outputs, inputs] that share a scale, in place of `group_size`; or None.
        symmetric: zero is in the middle of the codes, and not stored.
        targets: names of layers, `re:` and a regular expression, or the class Linear.
    """

    layout: str
    bits: int
    group_size: int = WHOLE_ROW
    block: tuple[int, int] | None = None
    symmetric: bool = True
    targets: tuple[str, ...] = ("Linear",)

    def __str__(self) -> str:
        if self.block is not None:
            spread = f"blocks of {self.block[0]}x{self.block[1]}"
        elif self.group_size == WHOLE_ROW:
            spread = "a scale for each row or matrix"
        else:
            spread = f"groups of {self.group_size}"
        return f"{self.bits} bits, {spread}"


@dataclass(frozen=True, slots=True)
class CheckpointQuantization:
    """The supported part of a quantization_config.

    Attributes:
        method: the `quant_method`.
        schemes: at least one.
    """

    method: str
    schemes: tuple[WeightScheme, ...]

    def __str__(self) -> str:
        return f"{self.method}, " + "; ".join(dict.fromkeys(map(str, self.schemes)))

    def scheme_of(self, layer: str) -> WeightScheme | None:
        """Return the scheme of a layer: by its name, else by an expression, else by its class."""
        for matches in (_is_named, _fits_expression, _is_linear):
            for scheme in self.schemes:
                if any(matches(target, layer) for target in scheme.targets):
                    return scheme
        return None


def parameters_of(name: str, shape: list[int], quantization: CheckpointQuantization | None) -> int:
    """Return the number of weights that a tensor of a checkpoint holds."""
    count = math.prod(shape)
    if quantization is None:
        return count
    bits = quantization.schemes[0].bits
    if name.endswith((".qweight", ".weight_packed")):
        return count * 32 // bits
    if name.endswith(_FACTORS) or ".weight." in name:
        return 0
    packs_bytes = quantization.method == "bitsandbytes" and bits == 4 and shape[1:] == [1]
    return 2 * count if packs_bytes else count


def _is_named(target: str, layer: str) -> bool:
    return target == layer


def _fits_expression(target: str, layer: str) -> bool:
    return target.startswith("re:") and re.match(target.removeprefix("re:"), layer) is not None


def _is_linear(target: str, _: str) -> bool:
    return target == "Linear"


GROUP_SIZES = (128, 64, 32, WHOLE_ROW)
REMEDY = "take another checkpoint of the model, or the unquantized one with --quantization int8"

Settings = Mapping[str, Any]


def read_quantization(config: Settings) -> CheckpointQuantization | None:
    """Return how the weights of a config.json are quantized, or None if they are not.

    Raises:
        ModelError: the method, or one of its settings, is not supported.
    """
    settings = config.get("quantization_config") or config.get("compression_config")
    if not settings:
        return None
    method = str(settings.get("quant_method"))
    if is_mxfp4(config):
        return None
    if method not in _METHODS:
        _refuse("quant_method", method, tuple(sorted(_METHODS)))
    return CheckpointQuantization(method, _METHODS[method](settings))


def is_mxfp4(config: Settings) -> bool:
    """Return whether a gpt-oss has experts in MXFP4, which become bfloat16 exactly at load."""
    method = (config.get("quantization_config") or {}).get("quant_method")
    return method == "mxfp4" and config.get("model_type") == "gpt_oss"


def _gptq(settings: Settings) -> tuple[WeightScheme, ...]:
    bits = _require_bits(settings, "bits", (4, 8))
    group_size = _require(settings, "group_size", GROUP_SIZES)
    layout = _require(settings, "checkpoint_format", ("gptq", "gptq_v2"))
    _require(settings, "pack_dtype", ("int32",))
    _require(settings, "is_marlin_format", (False,))
    overrides = [key for key in _map(settings, "dynamic") if not key.startswith("-")]
    if overrides:
        _refuse(
            "dynamic", overrides[0], ("only patterns of unquantized layers, that begin with -",)
        )
    return (WeightScheme(layout, bits, group_size, symmetric=False),)


def _awq(settings: Settings) -> tuple[WeightScheme, ...]:
    _require(settings, "version" if "version" in settings else "format", ("gemm", "GEMM"))
    bits = _require_bits(settings, "bits" if "bits" in settings else "w_bit", (4,))
    key = "group_size" if "group_size" in settings else "q_group_size"
    group_size = _require(settings, key, GROUP_SIZES)
    _require(settings, "zero_point", (True,))
    return (WeightScheme("awq", bits, group_size, symmetric=False),)


def _fp8(settings: Settings) -> tuple[WeightScheme, ...]:
    _require(settings, "fmt", ("e4m3", "float8_e4m3fn", "e4m3fn"))
    block = settings.get("weight_block_size")
    return (WeightScheme("fp8", 8, block=_block(block) if block else None),)


def _fbgemm_fp8(_: Settings) -> tuple[WeightScheme, ...]:
    return (WeightScheme("fp8", 8),)


def _bitsandbytes(settings: Settings) -> tuple[WeightScheme, ...]:
    if settings.get("load_in_8bit") or settings.get("_load_in_8bit"):
        return (WeightScheme("bitsandbytes", 8),)
    _require(settings, "bnb_4bit_quant_type", ("nf4", "fp4"))
    _require(settings, "bnb_4bit_quant_storage", ("uint8",))
    return (WeightScheme("bitsandbytes", 4, 64),)


def _compressed_tensors(settings: Settings) -> tuple[WeightScheme, ...]:
    _require(settings, "quantization_status", ("compressed",))
    for key in ("sparsity_config", "transform_config"):
        nested = _map(settings, key)
        if nested.get("format", "dense") != "dense" or nested.get("config_groups"):
            _refuse(key, nested.get("format", "config_groups"), ("none",))
    groups = _map(settings, "config_groups")
    if not groups:
        _refuse("config_groups", groups, ("groups with weights",))
    return tuple(
        _compressed_scheme(f"config_groups.{name}", _map(groups, name), settings) for name in groups
    )


def _compressed_scheme(where: str, group: Settings, settings: Settings) -> WeightScheme:
    weights = group.get("weights")
    if not isinstance(weights, Mapping):
        _refuse(f"{where}.weights", weights, ("the scheme of the weights",))
    kind = _require(weights, "type", ("int", "float"), where)
    layouts = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")
    layout = group.get("format") or settings.get("format")
    if layout not in layouts:
        _refuse("format", layout, layouts)
    bits = _require(weights, "num_bits", (8,) if kind == "float" else (4, 8), where)
    group_size = WHOLE_ROW
    # Without a strategy, a matrix has one scale, or as many as the size of a group asks for.
    strategies = ("tensor", "channel", "group", "block")
    strategy = _require(weights, "strategy", strategies, where)
    if weights.get("strategy") is None and weights.get("group_size") is not None:
        strategy = "group"
    if strategy == "group":
        group_size = _require(weights, "group_size", GROUP_SIZES, where)
    return WeightScheme(
        "pack-quantized" if layout == "pack-quantized" else kind,
        bits,
        group_size,
        _block(weights.get("block_structure")) if strategy == "block" else None,
        bool(weights.get("symmetric", True)),
        _targets(f"{where}.targets", group.get("targets")),
    )


_METHODS: dict[str, Callable[[Settings], tuple[WeightScheme, ...]]] = {
    "gptq": _gptq,
    "awq": _awq,
    "fp8": _fp8,
    "fbgemm_fp8": _fbgemm_fp8,
    "bitsandbytes": _bitsandbytes,
    "compressed-tensors": _compressed_tensors,
}


def _block(value: Any) -> tuple[int, int]:
    sizes = value.split("x") if isinstance(value, str) else value  # such as 128x128
    try:
        outputs, inputs = msgspec.convert(sizes, tuple[int, int], strict=False)
    except msgspec.ValidationError:
        _refuse("weight_block_size", value, ("[outputs, inputs]",))
    if min(outputs, inputs) < 1:
        _refuse("weight_block_size", value, ("sizes from 1 on",))
    return outputs, inputs


def _map(settings: Settings, key: str) -> Settings:
    """Return a setting that is a map; an empty one for a missing or null one."""
    value = settings.get(key)
    if not isinstance(value, Mapping | None):
        _refuse(key, value, ("a map",))
    return value or {}


def _targets(where: str, value: Any) -> tuple[str, ...]:
    """Return the names of the layers that a group has; by default all linear ones."""
    try:
        return msgspec.convert(value or ("Linear",), tuple[str, ...])
    except msgspec.ValidationError:
        _refuse(where, value, ("a list of texts",))


def _require(settings: Settings, key: str, allowed: tuple[Any, ...], where: str = "") -> Any:
    """Return a setting; the first of `allowed` for a missing or null one."""
    value = settings.get(key)
    if value is None:
        return allowed[0]
    if value not in allowed:
        _refuse(f"{where}.{key}" if where else key, value, allowed)
    return value


def _require_bits(settings: Settings, key: str, allowed: tuple[int, ...]) -> int:
    """Return a number of bits, for which there is no default."""
    if settings.get(key) is None:
        _refuse(key, None, allowed)
    return int(_require(settings, key, allowed))


def _refuse(key: str, value: Any, supported: tuple[Any, ...]) -> NoReturn:
    shown = ", ".join(map(str, supported))
    raise ModelError(
        f"config.json has quantization_config.{key} = {value!r}; supported: {shown}; {REMEDY}"
    )


# The block types of GGUF that are multiplied as they are stored.
#
# Source: https://github.com/ggml-org/ggml, ggml-common.h.

# Types that are not quantized.
FLOAT_TYPES = ("F32", "F16", "BF16")


class BlockSize(NamedTuple):
    """Neighbouring weights of a row that are stored together, and their bytes."""

    weights: int
    num_bytes: int


BLOCK_SIZES = {
    "Q4_0": BlockSize(32, 18),
    "Q4_1": BlockSize(32, 20),
    "Q5_0": BlockSize(32, 22),
    "Q5_1": BlockSize(32, 24),
    "Q8_0": BlockSize(32, 34),
    "Q2_K": BlockSize(256, 84),
    "Q3_K": BlockSize(256, 110),
    "Q4_K": BlockSize(256, 144),
    "Q5_K": BlockSize(256, 176),
    "Q6_K": BlockSize(256, 210),
    "IQ4_NL": BlockSize(32, 18),
    "IQ4_XS": BlockSize(256, 136),
    "MXFP4": BlockSize(32, 17),
}


def check_packed_types(file: Path, tensors: Mapping[str, Mapping[str, Any]]) -> None:
    """Check that every tensor can stay as it is stored.

    Args:
        file: the GGUF, for the message.
        tensors: {name: {"type": name of the type, ...}}.

    Raises:
        ModelError: a tensor has a type that the kernels do not multiply.
    """
    for name, entry in tensors.items():
        if entry["type"] not in FLOAT_TYPES and entry["type"] not in BLOCK_SIZES:
            raise ModelError(
                f"{file}: tensor {name} has type {entry['type']}, which --quantization gguf cannot"
                f" multiply as stored (supported: {', '.join((*BLOCK_SIZES, *FLOAT_TYPES))}); take"
                " a file of these types, or --quantization none, which makes it dense"
            )
