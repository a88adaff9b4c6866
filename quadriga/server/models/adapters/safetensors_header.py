"""The header of a safetensors file: names, types and shapes of its tensors, without torch.

Format: https://huggingface.co/docs/safetensors.
"""

import json
import math
import struct
from dataclasses import dataclass

from quadriga.errors import ModelError, quoted

MAX_HEADER_BYTES = 100_000_000  # the format's own limit
ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}


@dataclass(frozen=True, slots=True)
class HeaderEntry:
    """A tensor of a file.

    Attributes:
        dtype: one of ITEM_BYTES.
        shape: its sizes.
        begin, end: its bytes in the file.
    """

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def header_length(start: bytes) -> int:
    """Return the number of bytes before the first tensor's, of the first 8 bytes of a file.

    Raises:
        ModelError: the file is shorter, or is no safetensors file.
    """
    if len(start) < 8:
        raise ModelError(f"it is cut short: it has {len(start)} bytes; fetch it again")
    (length,) = struct.unpack("<Q", start)
    if length > MAX_HEADER_BYTES:
        raise ModelError("it is no safetensors file; save it again")
    return 8 + int(length)


def parse_header(header: bytes, num_bytes: int) -> dict[str, HeaderEntry]:
    """Return the tensors by their names.

    Args:
        header: the first `header_length` bytes of the file.
        num_bytes: of the whole file.

    Raises:
        ModelError: the file is cut short or damaged, or has tensors of another type; the message
            has to be put behind its path.
    """
    if len(header) < header_length(header[:8]):
        raise ModelError(f"it is cut short: it has {len(header)} bytes; fetch it again")
    try:
        entries = json.loads(header[8:])
        tensors = {
            name: HeaderEntry(
                entry["dtype"],
                tuple(map(int, entry["shape"])),
                *(len(header) + int(place) for place in entry["data_offsets"]),
            )
            for name, entry in entries.items()
            if name != "__metadata__"
        }
    except (UnicodeDecodeError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise ModelError("its header is damaged; fetch it again") from None
    for name, tensor in tensors.items():
        _check(name, tensor, len(header), num_bytes)
    return tensors


def _check(name: str, tensor: HeaderEntry, first: int, num_bytes: int) -> None:
    if tensor.dtype not in ITEM_BYTES:
        raise ModelError(
            f"its tensor {quoted(name)} is {quoted(tensor.dtype)}; supported:"
            f" {', '.join(ITEM_BYTES)}"
        )
    if tensor.end > num_bytes:
        raise ModelError(
            f"it is cut short: {quoted(name)} ends at byte {tensor.end:,} of {num_bytes:,}; fetch"
            " it again"
        )
    size = math.prod(tensor.shape) * ITEM_BYTES[tensor.dtype]
    if (
        tensor.begin < first
        or tensor.end - tensor.begin != size
        or min(tensor.shape, default=1) < 0
    ):
        raise ModelError(f"its header is damaged: of {quoted(name)}; fetch it again")
