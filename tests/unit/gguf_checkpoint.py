"""Write a tiny model's checkpoint as a GGUF with all of its weights."""

import json
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file

from quadriga.server.models.resolve import ModelFiles

MAX_BLOCKS = 4


def gguf_of(directory: Path, kind_of: Callable[[str], Kind] = lambda name: Kind.Q8_0) -> ModelFiles:
    """Write the GGUF beside the checkpoint, and return the model's files.

    `kind_of` returns the format of a matrix by its name in the GGUF; matrices whose rows are no
    multiple of 32 are float32.
    """
    file = directory / "tiny.gguf"
    _write(directory, file, kind_of)
    index = file.with_suffix(".json")
    index.write_text(json.dumps(_index(file)))
    config = json.loads((directory / "config.json").read_text())
    config["model_type"] = config["model_type"].removesuffix("_text")
    return ModelFiles(file.name, str(file), config, {}, directory, file, index)


def _write(directory: Path, file: Path, kind_of: Callable[[str], Kind]) -> None:
    """Write tensors as llama.cpp's converter does.

    Q and K of a Llama, Granite or SmolLM3 are interleaved, GPT-2's projections are
    [outputs, inputs], 1 is added to Gemma's norms. A model with rotary positions has their
    constants, too, which are not weights.
    """
    config = json.loads((directory / "config.json").read_text())
    interleaves = config["model_type"] in ("granite", "llama", "smollm3")
    is_gemma = config["model_type"].startswith("gemma")
    kind = config["model_type"].removesuffix("_text")
    architecture = gguf.MODEL_ARCH[kind.upper()]
    writer = gguf.GGUFWriter(file, kind)
    names = gguf.get_tensor_name_map(architecture, MAX_BLOCKS)
    for name, tensor in load_file(directory / "model.safetensors").items():
        values = tensor.numpy()
        if interleaves and (".q_proj." in name or ".k_proj." in name):
            count = config["num_attention_heads" if ".q_proj." in name else "num_key_value_heads"]
            halves = values.reshape(count, 2, -1, *values.shape[1:])
            values = halves.swapaxes(1, 2).reshape(values.shape)
        if kind == "gpt2" and name.endswith((".c_attn.weight", ".c_proj.weight", ".c_fc.weight")):
            values = values.T
        if is_gemma and name.endswith("norm.weight"):
            values = values + 1
        values = np.ascontiguousarray(values)
        stored = names.get_name(name.removeprefix("transformer."), (".weight", ".bias"))
        assert stored is not None
        if values.ndim == 2 and values.shape[1] % 32 == 0:
            packed = kind_of(stored)
            writer.add_tensor(stored, gguf.quants.quantize(values, packed), raw_dtype=packed)
        else:
            writer.add_tensor(stored, values.astype(np.float32))
    if "rope_type" in (config.get("rope_parameters") or {}):
        writer.add_tensor("rope_freqs.weight", np.ones(8, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _index(file: Path) -> dict[str, dict[str, object]]:
    """Return the index of a GGUF as model resolution makes it."""
    return {
        tensor.name: {
            "type": tensor.tensor_type.name,
            "shape": [int(size) for size in reversed(tensor.shape)],
            "offset": int(tensor.data_offset),
            "bytes": int(tensor.n_bytes),
        }
        for tensor in gguf.GGUFReader(file).tensors
    }
