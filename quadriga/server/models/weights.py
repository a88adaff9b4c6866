"""What the weights files of a model hold, read from their headers."""

import math
import struct
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from quadriga.errors import ModelError
from quadriga.server.models.formats import directory, gguf_reader
from quadriga.server.models.formats.quantization import parameters_of, read_quantization
from quadriga.server.models.resolve import ModelFiles

# Parts of the names of tensors that are no weights of a linear layer of their own.
NOT_LINEAR = ("token_embd.", "_exps.")


@dataclass(slots=True)
class WeightSummary:
    """The tensors of a model.

    Attributes:
        bytes_by_format: bytes of the tensors of each format, such as BF16 or Q4_1.
        parameters_by_format: number of their values.
        linear_by_format: without the embeddings and experts of a GGUF.
    """

    bytes_by_format: Counter[str] = field(default_factory=Counter)
    parameters_by_format: Counter[str] = field(default_factory=Counter)
    linear_by_format: Counter[str] = field(default_factory=Counter)

    @property
    def num_parameters(self) -> int:
        """Number of values of all tensors."""
        return sum(self.parameters_by_format.values())

    def add(self, name: str, kind: str, num_parameters: int, num_bytes: int) -> None:
        """Count a tensor."""
        self.bytes_by_format[kind] += num_bytes
        self.parameters_by_format[kind] += num_parameters
        if not any(part in name for part in NOT_LINEAR):
            self.linear_by_format[kind] += num_parameters

    def add_mxfp4(self, name: str, shape: list[int], num_bytes: int) -> None:
        """Count the codes of gpt-oss, two in a byte, or their scales, which are no parameters."""
        count = 2 * math.prod(shape) if name.endswith("_blocks") else 0
        self.add(name, "MXFP4", count, num_bytes)


class _Tensor(msgspec.Struct):
    """A tensor in the header of a safetensors file; the offsets are in bytes."""

    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


def summarize_weights(files: ModelFiles, checks_files: bool = True) -> WeightSummary:
    """Return the sums over all tensors.

    Args:
        files: the model's files.
        checks_files: let the safetensors library check the files, which imports numpy.

    Raises:
        ModelError: a file is damaged or cut short.
    """
    summary = WeightSummary()
    if files.weights is None:
        return summary
    if files.tensor_index is not None:
        ends = Counter[int]()
        for name, entry in directory.read_json(files.tensor_index).items():
            summary.add(name, entry["type"], math.prod(entry["shape"]), entry["bytes"])
            part = entry.get("part", 0)
            ends[part] = max(ends[part], entry["offset"] + entry["bytes"])
        for part, file in enumerate(gguf_reader.gguf_files(files.weights)):
            _check_size(file, ends[part])
        return summary
    quantization = read_quantization(files.config)
    for path in weight_files(files.weights):
        for name, entry in _safetensors_header(path, checks_files).items():
            begin, end = entry.data_offsets
            if entry.dtype == "U8" and name.endswith(("_blocks", "_scales")):
                summary.add_mxfp4(name, entry.shape, end - begin)
                continue
            count = parameters_of(name, entry.shape, quantization)
            summary.add(name, entry.dtype, count, end - begin)
    return summary


def weight_files(weights: Path) -> list[Path]:
    """Return the files that hold a model's weights."""
    if weights.is_file():
        return gguf_reader.gguf_files(weights)
    if shards := directory.indexed_shards(weights):
        return shards
    single = weights / "model.safetensors"
    return [single] if single.is_file() else sorted(weights.glob("*.safetensors"))


def _safetensors_header(path: Path, checks_file: bool) -> dict[str, _Tensor]:
    """Return the tensors of a header by name; the library checks the file."""
    from safetensors import SafetensorError, safe_open

    try:
        if checks_file:
            with safe_open(path, framework="numpy"):
                pass
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > path.stat().st_size:
                raise ValueError(f"its header would have {length} bytes")
            header = msgspec.json.decode(file.read(length), type=dict[str, msgspec.Raw])
        header.pop("__metadata__", None)
        return {name: msgspec.json.decode(raw, type=_Tensor) for name, raw in header.items()}
    except struct.error:
        raise ModelError(
            f"cannot read {path}: it is empty or cut short; fetch the file again"
        ) from None
    except (SafetensorError, OSError, ValueError, msgspec.MsgspecError) as error:
        raise ModelError(f"cannot read {path}: {error}; fetch the file again") from None


def _check_size(path: Path, expected_bytes: int) -> None:
    size = path.stat().st_size
    if size < expected_bytes:
        raise ModelError(
            f"cannot read {path}: it has {size} bytes, its header describes {expected_bytes};"
            " fetch the file again"
        )
