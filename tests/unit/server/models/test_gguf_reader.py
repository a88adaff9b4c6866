"""The reader of GGUF headers agrees with the package gguf, and bounds what it reads."""

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFReader, GGUFWriter

from quadriga.errors import ModelError
from quadriga.server.models.formats.gguf_reader import read_float32, read_header
from tests.unit.tiny_gguf import write_tiny_gguf


def header_of(kind: int, value: bytes) -> bytes:
    """A GGUF with one key and no tensor."""
    return b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q1sI", 1, b"k", kind) + value


@pytest.mark.parametrize("options", [{}, {"output": True}, {"scaling": "linear"}])
def test_every_value_and_tensor_is_that_of_the_package(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf", **options)
    ours, theirs = read_header(path), GGUFReader(path)
    fields = {n: f.contents() for n, f in theirs.fields.items() if not n.startswith("GGUF.")}
    assert ours.metadata == fields
    assert ours.tensors == {
        tensor.name: {
            "type": tensor.tensor_type.name,
            "shape": [int(size) for size in reversed(tensor.shape)],
            "offset": int(tensor.data_offset),
            "bytes": int(tensor.n_bytes),
        }
        for tensor in theirs.tensors
    }


def test_values_of_every_type_are_read(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "types.gguf", "llama")
    writer.add_uint8("u8", 200)
    writer.add_int16("i16", -300)
    writer.add_uint64("u64", 1 << 60)
    writer.add_float64("f64", 0.1)
    writer.add_bool("yes", True)
    writer.add_string("text", "é\0")
    writer.add_array("flags", [True, False])
    writer.add_array("floats", [0.5, -2.0])
    writer.add_array("texts", ["", "日本"])
    writer.add_tensor("constants", np.array([1.5, -2.0], dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    header = read_header(tmp_path / "types.gguf")
    assert header.metadata == {
        "general.architecture": "llama", "u8": 200, "i16": -300, "u64": 1 << 60, "f64": 0.1,
        "yes": True, "text": "é\0", "flags": [True, False], "floats": [0.5, -2.0],
        "texts": ["", "日本"],
    }  # fmt: skip
    assert read_float32(tmp_path / "types.gguf", header.tensors["constants"]) == [1.5, -2.0]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1 is not one of"),
        (header_of(8, struct.pack("<Q", 1 << 40)), "goes beyond the end"),
        (header_of(9, struct.pack("<IQ", 6, 1 << 40)), "goes beyond the end"),
        (header_of(9, struct.pack("<IQQ", 8, 2, 1 << 40)), "goes beyond the end"),
        (header_of(9, struct.pack("<IQIQ", 9, 1, 6, 0)), "arrays of arrays"),
        (header_of(99, b""), "99"),
        (header_of(10, b"1"), "its header goes beyond the end"),
    ],
)
def test_a_damaged_header_is_one_line(tmp_path: Path, content: bytes, said: str) -> None:
    (tmp_path / "odd.gguf").write_bytes(content)
    with pytest.raises(ModelError, match=r"odd\.gguf is damaged or cut short") as caught:
        read_header(tmp_path / "odd.gguf")
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_missing_bytes_of_the_last_tensor_are_noticed(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf")
    end = max(entry["offset"] + entry["bytes"] for entry in read_header(path).tensors.values())
    path.write_bytes(path.read_bytes()[: end - 1])
    with pytest.raises(ModelError, match=r"blk\.0\.attn_k\.weight goes beyond the end"):
        read_header(path)
