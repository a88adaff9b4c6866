"""The files of an adapter: which there are, their identity, and a first check.

An adapter is a directory as PEFT writes it, or a GGUF of the type adapter.
"""

import dataclasses
import hashlib
import json
import math
import struct
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from quadriga import disk
from quadriga.errors import ModelError, quoted
from quadriga.server.models.adapters.peft_config import (
    CONFIG_NAME,
    PeftConfig,
    parse_config,
    split_name,
)
from quadriga.server.models.formats import gguf_reader

SAFETENSORS_NAME, PICKLE_NAME = "adapter_model.safetensors", "adapter_model.bin"
LORA_TYPE = "lora"
_MAX_CONFIG_BYTES = 16_000_000
MAX_HEADER_BYTES = 100_000_000  # the format's own limit
ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}


@dataclass(frozen=True, slots=True)
class HeaderEntry:
    """A tensor in the header of a file of safetensors.

    Attributes:
        dtype: one of ITEM_BYTES.
        shape: its sizes.
        begin, end: its bytes in the file.
    """

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class AdapterSummary:
    """What the header of an adapter says.

    Attributes:
        path: of the adapter.
        base: the name of the model that it was trained on, or "".
        rank: the largest rank of its matrices; 0 if the header does not say it.
        num_bytes: of the file of its tensors.
    """

    path: Path
    base: str
    rank: int
    num_bytes: int


def check_adapter(path: str | Path, max_rank: int | None = None) -> AdapterSummary:
    """Read the headers of an adapter, in milliseconds.

    Args:
        path: a directory of PEFT, or a GGUF.
        max_rank: the largest rank that is served; None: there is no limit.

    Raises:
        ModelError: there is no adapter, it is broken, or it is not supported.
    """
    summary = _summary(adapter_file(path))
    try:
        check_rank(summary.rank, max_rank)
    except ModelError as error:
        raise ModelError(f"the adapter {summary.path}: {error}") from None
    return summary


def check_rank(rank: int, max_rank: int | None) -> None:
    """Raise ModelError if a rank is above the largest one that is served; None: no limit.

    The message has to be put behind the adapter's path.
    """
    if max_rank is not None and rank > max_rank:
        raise ModelError(
            f"it has rank {rank}, and --max-lora-rank is {max_rank}: start the server with a larger"
            " one"
        )


def adapter_id(path: str | Path) -> str:
    """Return a hash of all that changes an adapter's answers, in hexadecimal digits.

    It reads the whole adapter: 1 GB takes about a second.

    Raises:
        ModelError: there is no adapter, it is broken, or it is not supported.
    """
    return read_content(path).id


def adapter_file(path: str | Path) -> Path:
    """Return the directory or the file of an adapter. Raise ModelError if there is none."""
    found = Path(path).expanduser()
    if found.is_dir():
        if not (found / CONFIG_NAME).is_file():
            ggufs = sorted(found.glob("*.gguf"))
            remedy = f"; a GGUF is named itself, such as {ggufs[0]}" if ggufs else ""
            raise ModelError(f"the adapter {found} has no {CONFIG_NAME}{remedy}")
        return found
    if not found.is_file():
        raise ModelError(
            f"the adapter {found}: there is no such file or directory; give the directory that"
            " save_pretrained wrote, or a GGUF"
        )
    return found


@dataclass(frozen=True)
class AdapterContent:
    """An adapter as it was at one moment, whatever becomes of its files.

    Attributes:
        path: its directory or file.
        weights_name: of the file of its tensors.
        weights: the bytes of that file.
        config: of PEFT; None: it is a GGUF.
        header: of a GGUF; None: it is of PEFT.
    """

    path: Path
    weights_name: str
    weights: bytes
    config: PeftConfig | None = None
    header: gguf_reader.GGUFHeader | None = None

    @cached_property
    def id(self) -> str:
        """A hash of all that changes answers: the settings, and the tensors in any order."""
        digest = hashlib.sha256()
        if self.config is None or self.weights_name != SAFETENSORS_NAME:
            digest.update(_settings(self.config))
            digest.update(self.weights)
            return digest.hexdigest()
        digest.update(_settings(self.config))
        view = memoryview(self.weights)
        for name, tensor in sorted(self.tensors.items()):
            digest.update(json.dumps([name, tensor.dtype, tensor.shape]).encode())
            digest.update(view[tensor.begin : tensor.end])
        return digest.hexdigest()

    @cached_property
    def tensors(self) -> dict[str, HeaderEntry]:
        """The tensors of a safetensors file. Raises ModelError if it is damaged."""
        length = header_length(self.weights[:8])
        return parse_header(self.weights[:length], len(self.weights))


def read_content(path: str | Path) -> AdapterContent:
    """Read an adapter's files once, so that its identity is that of what is computed.

    Raises:
        ModelError: there is no adapter, it is broken, or it is not supported.
    """
    found = adapter_file(path)
    if not found.is_dir():
        data = _read(found)
        header = _checked(found, gguf_reader.parse_header(data, found))
        return AdapterContent(found, found.name, data, header=header)
    config, weights = _read_config(found), _weights_file(found)
    content = AdapterContent(found, weights.name, _read(weights), config)
    if weights.name == SAFETENSORS_NAME:
        try:
            _ = content.tensors
        except ModelError as error:
            raise ModelError(f"the adapter's {weights}: {error}") from None
    return content


def _summary(found: Path) -> AdapterSummary:
    if not found.is_dir():
        metadata = _checked(found, gguf_reader.read_header(found)).metadata
        base = metadata.get("general.base_model.0.name") or ""
        return AdapterSummary(found, str(base), 0, found.stat().st_size)
    config, weights = _read_config(found), _weights_file(found)
    num_bytes = weights.stat().st_size
    if weights.name == SAFETENSORS_NAME:
        try:
            with weights.open("rb") as file:
                start = file.read(8)
                header = start + file.read(header_length(start) - 8)
            _check_names(parse_header(header, num_bytes))
        except OSError as error:
            raise ModelError(f"cannot read {weights}: {error.strerror}") from None
        except ModelError as error:
            raise ModelError(f"the adapter's {weights}: {error}") from None
    return AdapterSummary(found, config.base, config.largest_rank, num_bytes)


def _check_names(tensors: dict[str, HeaderEntry]) -> None:
    """Raise ModelError for a file without tensors of LoRA, or with others."""
    unknown = [name for name in tensors if split_name(name) is None]
    if unknown or not tensors:
        named = f"the tensor {quoted(unknown[0])}, which is none" if unknown else "no tensors"
        raise ModelError(f"it has {named} of LoRA; save the adapter again by save_pretrained")


def _read_config(directory: Path) -> PeftConfig:
    path = directory / CONFIG_NAME
    if path.stat().st_size > _MAX_CONFIG_BYTES:
        raise ModelError(f"the adapter's {path} is no settings file: it has more than 16 MB")
    try:
        return parse_config(_read(path))
    except ModelError as error:
        raise ModelError(f"the adapter {directory}: {error}") from None


def _weights_file(directory: Path) -> Path:
    for name in (SAFETENSORS_NAME, PICKLE_NAME):
        if (directory / name).is_file():
            return directory / name
    raise ModelError(
        f"the adapter {directory} has neither {SAFETENSORS_NAME} nor {PICKLE_NAME}: save it by"
        " save_pretrained"
    )


def _checked(file: Path, header: gguf_reader.GGUFHeader) -> gguf_reader.GGUFHeader:
    """Return the header of an adapter. Raise ModelError for that of something else."""
    kind = header.metadata.get("general.type")
    if kind != "adapter":
        raise ModelError(
            f"{file} is a GGUF of type {kind or 'model'!r}, and no adapter: give it to --model, or"
            " convert an adapter by llama.cpp's convert_lora_to_gguf"
        )
    if header.metadata.get("adapter.type", LORA_TYPE) != LORA_TYPE:
        raise ModelError(
            f"{file} has adapter.type {header.metadata['adapter.type']!r}; supported: {LORA_TYPE!r}"
        )
    return header


def _settings(config: PeftConfig | None) -> bytes:
    """Return what changes answers; the name of the base does not."""
    if config is None:
        return b""
    values: dict[str, Any] = dataclasses.asdict(config)
    del values["base"]
    return json.dumps(values, sort_keys=True).encode()


def _read(path: Path) -> bytes:
    try:
        return disk.read_bytes(path)
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}") from None


# --- the header of a file of safetensors ------------------------------------------------------


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
        _check_entry(name, tensor, len(header), num_bytes)
    return tensors


def _check_entry(name: str, tensor: HeaderEntry, first: int, num_bytes: int) -> None:
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
