"""How a quantized checkpoint stores its weights.

Which layers are quantized is read from the tensors' names and dtypes, so that layers in `ignore` or
`modules_to_not_convert` need no treatment of their own.
"""

import math
import re
from dataclasses import dataclass

WHOLE_ROW = -1  # as a group size: all inputs of a row share a scale
# Tensors that belong to the weights of a layer and are no weights.
_FACTORS = (".scales", ".qzeros", ".g_idx", ".weight_g_idx", "_scale", ".weight_scale_inv",
            "_zero_point", ".weight_shape", ".SCB", ".weight_format")  # fmt: skip


@dataclass(frozen=True, slots=True)
class WeightScheme:
    """How the weights of some layers are stored.

    Attributes:
        layout: Which tensors a layer has, such as gptq or pack-quantized.
        bits: Bits of a weight.
        group_size: Neighbouring inputs of a row that share a scale, or WHOLE_ROW.
        block: [outputs, inputs] that share a scale, in place of `group_size`; or None.
        symmetric: Zero is in the middle of the codes, and not stored.
        targets: Names of layers, `re:` and a regular expression, or the class Linear.
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
        method: The `quant_method`.
        schemes: At least one.
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
