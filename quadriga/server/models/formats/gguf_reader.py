"""Readers of a GGUF's metadata and tensor index.

First the whole header, then that of a GGUF which llama.cpp's gguf-split has written to several
files, then the first keys alone, in milliseconds.
"""

import math
import mmap
import re
import struct
from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from quadriga.errors import ModelError, quoted

# A vocabulary of 262,144 tokens takes a tenth of a second; the package gguf takes ten. Source:
# the GGUF specification (ggml, docs/gguf.md).

TensorIndex = dict[str, dict[str, Any]]

VERSIONS = (2, 3)
BIG_ENDIAN_VERSIONS = tuple(version << 24 for version in VERSIONS)  # as little-endian numbers
STRING_TYPE, ARRAY_TYPE, BOOL_TYPE = 8, 9, 7
# Formats of struct and array by GGUF's value types.
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B",
           10: "Q", 11: "q", 12: "d"}  # fmt: skip
DEFAULT_ALIGNMENT = 32
MAX_DIMENSIONS = 4
MAX_LAYERS, MAX_SIZE = 10_000, 2**31 - 1
# Keys without the architecture's prefix that may have a value for each layer.
LAYER_VALUES = ("attention.head_count", "attention.head_count_kv", "feed_forward_length")
_SIZE = (Annotated[int, Meta(ge=1, le=MAX_SIZE)], f"a whole number from 1 to {MAX_SIZE}")
_COUNT = (Annotated[int, Meta(ge=0, le=MAX_SIZE)], f"a whole number from 0 to {MAX_SIZE}")
# An id that no vocabulary has means none in some files.
_TOKEN_ID = (Annotated[int, Meta(ge=0, le=2**32 - 1)], "a token id")
_NUMBER, _BOOL, _TEXT = (float, "a number"), (bool, "a truth value"), (str, "a text")
# Types of values, and the words that an error has for them, by keys without the architecture.
_KINDS: dict[str, tuple[Any, str]] = {
    "general.architecture": _TEXT,
    "block_count": (Annotated[int, Meta(ge=1, le=MAX_LAYERS)], f"a number from 1 to {MAX_LAYERS}"),
    **dict.fromkeys(LAYER_VALUES, _SIZE),
    "context_length": _SIZE,
    "embedding_length": _SIZE,
    "attention.key_length": _SIZE,
    "attention.value_length": _NUMBER,
    "rope.dimension_count": _NUMBER,
    "attention.sliding_window": _NUMBER,
    "expert_count": _COUNT,
    "split.count": _COUNT,
    "split.no": _COUNT,
    "split.tensors.count": _COUNT,
    "rope.scaling.original_context_length": _COUNT,
    "attention.layer_norm_rms_epsilon": _NUMBER,
    "attention.layer_norm_epsilon": _NUMBER,
    "rope.freq_base": _NUMBER,
    "rope.freq_base_swa": _NUMBER,
    "rope.scale_linear": _NUMBER,
    "rope.scaling.factor": _NUMBER,
    "rope.scaling.attn_factor": _NUMBER,
    "attention.scale": _NUMBER,
    "embedding_scale": _NUMBER,
    "residual_scale": _NUMBER,
    "logit_scale": _NUMBER,
    "attn_logit_softcapping": _NUMBER,
    "final_logit_softcapping": _NUMBER,
    "rope.scaling.type": _TEXT,
    "tokenizer.chat_template": _TEXT,
    "tokenizer.ggml.model": _TEXT,
    "tokenizer.ggml.pre": _TEXT,
    "tokenizer.ggml.add_bos_token": _BOOL,
    "tokenizer.ggml.add_eos_token": _BOOL,
    "tokenizer.ggml.add_space_prefix": _BOOL,
    "tokenizer.ggml.tokens": (list[str], "a list of texts"),
    "tokenizer.ggml.merges": (list[str], "a list of texts"),
    "tokenizer.ggml.scores": (list[float], "a list of numbers"),
    "tokenizer.ggml.token_type": (list[int], "a list of whole numbers"),
}


@dataclass(frozen=True, slots=True)
class GGUFHeader:
    """What a GGUF says about its weights.

    Attributes:
        metadata: values by key; arrays are lists.
        tensors: {name: {"type": "Q4_1", "shape": [outermost first], "offset": absolute in the
            file, "bytes": count}}, in the file's order.
    """

    metadata: dict[str, Any]
    tensors: TensorIndex


def read_header(path: Path) -> GGUFHeader:
    """Read the metadata and the tensor index.

    Raises:
        ModelError: the file cannot be read, is damaged or cut short.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return parse_header(data, path)
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:  # an empty file cannot be mapped
        raise ModelError(f"{path} is damaged or cut short: {error}; fetch the file again") from None


def parse_header(data: mmap.mmap | bytes, path: Path) -> GGUFHeader:
    """Read the metadata and the tensor index of a file's bytes. `path` is for errors.

    Raises:
        ModelError: the file is damaged or cut short.
    """
    try:
        header = _Cursor(data).header()
        return GGUFHeader(checked_metadata(header.metadata), header.tensors)
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from None
    except struct.error:
        raise ModelError(
            f"{path} is damaged or cut short: its header goes beyond the end, at {len(data):,}"
            " bytes; fetch the file again"
        ) from None
    except (ValueError, KeyError) as error:
        raise ModelError(f"{path} is damaged or cut short: {error}; fetch the file again") from None


def read_float32(path: Path, entry: dict[str, Any]) -> list[float]:
    """Return the values of an F32 tensor of the index. Raise ModelError for another type."""
    if entry["type"] != "F32":
        raise ModelError(f"{path}: a tensor of constants is {entry['type']}, supported: F32")
    with path.open("rb") as file:
        file.seek(entry["offset"])
        return list(struct.unpack(f"<{entry['bytes'] // 4}f", file.read(entry["bytes"])))


def checked_metadata(metadata: dict[str, Any]) -> dict[str, Any]:
    """Return metadata whose values have the types that are read.

    A list with the same value for each layer becomes this value.

    Raises:
        ModelError: a value has another type, or differs between the layers.
    """
    checked = dict(metadata)
    prefix = f"{metadata.get('general.architecture')}."
    for key, value in metadata.items():
        name = key.removeprefix(prefix) if key.startswith(prefix) else key
        if name in LAYER_VALUES and isinstance(value, list):
            if any(item != value[0] for item in value[1:]):
                raise ModelError(
                    f"{key} is {quoted(value)}: it differs between the layers, which is not"
                    " supported; take a model whose layers have one size"
                )
            value = checked[key] = value[0] if value else None
        kind = _kind_of(name)
        if kind is not None:
            try:
                msgspec.convert(value, kind[0])
            except msgspec.ValidationError:
                raise ModelError(f"{key} is {quoted(value)}, and should be {kind[1]}") from None
    return checked


def _kind_of(name: str) -> tuple[Any, str] | None:
    if name.startswith("tokenizer.ggml.") and name.endswith("_token_id"):
        return _TOKEN_ID
    return _TEXT if name.startswith("tokenizer.chat_template.") else _KINDS.get(name)


class _Cursor:
    """A position in the header."""

    def __init__(self, data: mmap.mmap | bytes) -> None:
        self._data = data
        self._at = 0

    def header(self) -> GGUFHeader:
        """Read everything before the tensors' bytes."""
        magic, version, num_tensors, num_keys = self._values("4sIQQ")
        if magic == b"GGUF" and version in BIG_ENDIAN_VERSIONS:
            raise ModelError(
                "the file is a GGUF in big-endian order, and only little-endian ones are read;"
                " convert it in place with gguf-convert-endian FILE little (Python package gguf)"
            )
        if magic != b"GGUF" or version not in VERSIONS:
            raise ValueError(f"version {version} is not one of {VERSIONS}")
        metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            name = self._string()
            metadata[name] = self._value(*self._values("I"))
        tensors = dict(self._tensor() for _ in range(num_tensors))
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise ValueError(f"general.alignment is {alignment!r}")
        self._make_absolute(tensors, alignment)
        return GGUFHeader(metadata, tensors)

    def architecture_name(self) -> str | None:
        """Return general.architecture; None if an array comes before it."""
        _, _, _, num_keys = self._values("4sIQQ")
        for _ in range(num_keys):
            name = self._string()
            (kind,) = self._values("I")
            if kind == ARRAY_TYPE:
                return None
            value = self._value(kind)
            if name == "general.architecture" and kind == STRING_TYPE:
                return str(value)
        return None

    def _values(self, layout: str) -> tuple[Any, ...]:
        """Return little-endian values of a struct layout."""
        values = struct.unpack_from(f"<{layout}", self._data, self._at)
        self._at += struct.calcsize(f"<{layout}")
        return values

    def _string(self) -> str:
        (length,) = self._values("Q")
        end = self._at + length
        if end > len(self._data):
            raise ValueError(f"a string of {length} bytes goes beyond the end")
        text = self._data[self._at : end].decode(errors="replace")
        self._at = end
        return text

    def _value(self, kind: int) -> Any:
        if kind == STRING_TYPE:
            return self._string()
        if kind == ARRAY_TYPE:
            return self._array(*self._values("IQ"))
        (value,) = self._values(SCALARS[kind])
        return bool(value) if kind == BOOL_TYPE else value

    def _array(self, kind: int, length: int) -> list[Any]:
        if kind == STRING_TYPE:
            return self._strings(length)
        if kind == ARRAY_TYPE:
            raise ValueError("arrays of arrays are not supported")
        values = array(SCALARS[kind])
        end = self._at + length * values.itemsize
        if end > len(self._data):
            raise ValueError(f"an array of {length} values goes beyond the end")
        items = self._values(f"{length}{SCALARS[kind]}")
        return [bool(item) for item in items] if kind == BOOL_TYPE else list(items)

    def _strings(self, length: int) -> list[str]:
        """Return an array of strings; a loop over local names, as a vocabulary is long."""
        data, at, size = self._data, self._at, len(self._data)
        read_length = struct.Struct("<Q").unpack_from
        texts: list[str] = []
        for _ in range(length):
            begin = at + 8
            at = begin + read_length(data, at)[0]
            if at > size:
                raise ValueError("a string goes beyond the end")
            texts.append(data[begin:at].decode(errors="replace"))
        self._at = at
        return texts

    def _tensor(self) -> tuple[str, dict[str, Any]]:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        name = self._string()
        (num_dimensions,) = self._values("I")
        if num_dimensions > MAX_DIMENSIONS:
            raise ValueError(f"{name} has {num_dimensions} dimensions")
        shape = list(reversed(self._values(f"{num_dimensions}Q")))
        number, offset = self._values("IQ")
        kind = GGMLQuantizationType(number)
        block_size, block_bytes = GGML_QUANT_SIZES[kind]
        num_bytes = math.prod(shape) // block_size * block_bytes
        return name, {"type": kind.name, "shape": shape, "offset": offset, "bytes": num_bytes}

    def _make_absolute(self, tensors: TensorIndex, alignment: int) -> None:
        """Add the begin of the tensors' bytes to all offsets."""
        begin = -(-self._at // alignment) * alignment
        for name, entry in tensors.items():
            entry["offset"] += begin
            if entry["offset"] + entry["bytes"] > len(self._data):
                raise ValueError(f"{name} goes beyond the end")


# A GGUF that is split over files NAME-00001-of-00003.gguf, as llama.cpp's gguf-split writes them.
#
# The first file has the metadata of the model; each has a part of the tensors.

_PART_NAME = re.compile(r"(?P<name>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)


def gguf_files(path: Path) -> list[Path]:
    """Return all files of the GGUF that a file belongs to, the first one first; by their names."""
    match = _PART_NAME.fullmatch(path.name)
    if match is None or int(match["count"]) < 2:
        return [path]
    count = int(match["count"])
    return [
        path.with_name(f"{match['name']}-{number:05}-of-{count:05}.gguf")
        for number in range(1, count + 1)
    ]


def first_file(path: Path) -> Path:
    """Return the first file of the GGUF that `path` is a part of.

    Raises:
        ModelError: a part is missing.
    """
    files = gguf_files(path)
    missing = [file.name for file in files if not file.is_file()]
    if missing and path.is_file():
        raise ModelError(
            f"{path} is one of {len(files)} parts of a model, and {', '.join(missing)} is missing"
            " beside it; fetch all parts into one directory"
        )
    return files[0]


def read_whole_header(path: Path) -> GGUFHeader:
    """Return the metadata of the first file, and the tensors of all.

    Entries of tensors that are not in the first file have its index as "part".

    Raises:
        ModelError: a file cannot be read, or does not belong to the others.
    """
    header = read_header(path)
    files = gguf_files(path)
    count = header.metadata.get("split.count") or 1
    if count != len(files):
        raise ModelError(
            f"{path} is one of {count} parts of a model by its header, and of {len(files)} by its"
            f" name; name the parts NAME-00001-of-{count:05}.gguf and so on"
        )
    tensors: TensorIndex = dict(header.tensors)
    for part, file in enumerate(files[1:], 1):
        other = read_header(file)
        place = other.metadata.get("split.no"), other.metadata.get("split.count")
        if place != (part, count) or other.tensors.keys() & tensors.keys():
            raise ModelError(
                f"{file} is not part {part + 1} of {count} of the model of {path}; fetch it again"
            )
        tensors |= {name: {**entry, "part": part} for name, entry in other.tensors.items()}
    expected = header.metadata.get("split.tensors.count") or len(tensors)
    if expected != len(tensors):
        raise ModelError(
            f"the parts of {path} have {len(tensors)} tensors, its header names {expected}; fetch"
            " the files again"
        )
    return GGUFHeader(header.metadata, tensors)


def read_architecture_name(path: Path) -> str | None:
    """Return general.architecture, which writers put first, in milliseconds.

    Returns:
        The name; None if an array comes before it or the header is damaged, which the full
        reader then reports.

    Raises:
        ModelError: the file cannot be read, or is not a GGUF.
    """
    try:
        with path.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise ModelError(f"{path} is not a GGUF file: it does not begin with 'GGUF'")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Cursor(data).architecture_name()
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}") from None
    except (struct.error, ValueError, KeyError):
        return None
