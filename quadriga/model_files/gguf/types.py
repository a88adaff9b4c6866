"""The block types of GGUF that are multiplied as they are stored.

Source: https://github.com/ggml-org/ggml, ggml-common.h.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from quadriga.errors import ModelError

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
        file: The GGUF, for the message.
        tensors: {name: {"type": name of the type, ...}}.

    Raises:
        ModelError: A tensor has a type that the kernels do not multiply.
    """
    for name, entry in tensors.items():
        if entry["type"] not in FLOAT_TYPES and entry["type"] not in BLOCK_SIZES:
            raise ModelError(
                f"{file}: tensor {name} has type {entry['type']}, which --quantization gguf cannot"
                f" multiply as stored (supported: {', '.join((*BLOCK_SIZES, *FLOAT_TYPES))}); take"
                " a file of these types, or --quantization none, which makes it dense"
            )
