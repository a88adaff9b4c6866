"""The first keys of a GGUF's header, read in milliseconds.

Source: the GGUF specification (ggml, docs/gguf.md).
"""

import struct
from pathlib import Path
from typing import BinaryIO

from quadriga.errors import ModelError

STRING_TYPE, ARRAY_TYPE = 8, 9
SCALAR_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
MAX_NAME_BYTES = 1 << 16


def read_architecture_name(path: Path) -> str | None:
    """Return general.architecture, which writers put first.

    Returns:
        The name; None if an array comes before it or the header is damaged, which the full
        reader then reports.

    Raises:
        ModelError: The file cannot be read, or is not a GGUF.
    """
    try:
        with path.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise ModelError(f"{path} is not a GGUF file: it does not begin with 'GGUF'")
            return _find(file)
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}") from None
    except (struct.error, ValueError, KeyError):
        return None


def _find(file: BinaryIO) -> str | None:
    _version, _num_tensors, num_keys = struct.unpack("<IQQ", file.read(20))
    for _ in range(num_keys):
        name = _string(file)
        (kind,) = struct.unpack("<I", file.read(4))
        if name == "general.architecture" and kind == STRING_TYPE:
            return _string(file)
        if kind == ARRAY_TYPE:
            return None
        if kind == STRING_TYPE:
            _string(file)
        else:
            file.seek(SCALAR_BYTES[kind], 1)
    return None


def _string(file: BinaryIO) -> str:
    (length,) = struct.unpack("<Q", file.read(8))
    if length > MAX_NAME_BYTES:
        raise ValueError(f"a string of {length} bytes")
    return file.read(length).decode()
