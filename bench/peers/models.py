"""Write the compared models: a Hugging Face directory in bfloat16, and GGUFs."""

import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from quadriga.server.cache import cache_directory, publish_directory, scratch_directory
from quadriga.server.models.families import gpt
from quadriga.server.models.formats.gguf_config import header_files, make_config
from quadriga.server.models.sources import builtin_weights

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
# Load the compared models: float32 tensors under GGUF's names and in its layouts.

Array = npt.NDArray[np.float32]
ModelName = Literal["smollm2", "gpt2", "gemma3"]
RANDOM_SEED = 0
STANDARD_DEVIATION = 0.02
UNUSED_TOKEN_TYPE = 5  # of GGUF


@dataclass(frozen=True, slots=True)
class Field:
    """A metadata value of a GGUF with its type, and the type of a list's items."""

    value: Any
    kind: Any
    item_kind: Any = None


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model in memory.

    Attributes:
        architecture: architecture in GGUF.
        fields: metadata of the GGUF, without the architecture.
        tensors: tensors by their names in GGUF.
        config: Hugging Face's config.json.
        tokenizer_dir: directory of tokenizer.json; its vocabulary may be smaller than the model's.
    """

    architecture: str
    fields: Mapping[str, Field]
    tensors: Mapping[str, Array]
    config: Mapping[str, Any]
    tokenizer_dir: Path

    @property
    def vocab_size(self) -> int:
        """Vocabulary size of the model."""
        return int(self.config["vocab_size"])


def load_checkpoint(model: ModelName) -> Checkpoint:
    """Return the built-in model, or GPT-2 with random weights, or raise ModelError."""
    builtin = _builtin()
    return builtin if model == "smollm2" else _random_gpt2(builtin)


def _builtin() -> Checkpoint:
    from gguf import GGUFReader
    from gguf.quants import dequantize

    path = builtin_weights(show_progress=True)
    reader = GGUFReader(path)
    fields = {
        name: Field(field.contents(), field.types[0], field.types[-1] if field.types[1:] else None)
        for name, field in reader.fields.items()
        if not name.startswith("GGUF.") and name != "general.architecture"
    }
    tensors = {t.name: dequantize(t.data, t.tensor_type) for t in reader.tensors}
    index = {name: {"shape": list(tensor.shape)} for name, tensor in tensors.items()}
    metadata = {"general.architecture": "llama"} | {n: f.value for n, f in fields.items()}
    config = make_config(metadata, index, rope_divisors={})
    return Checkpoint("llama", fields, tensors, config, header_files(path))


def _random_gpt2(builtin: Checkpoint) -> Checkpoint:
    """Return GPT-2 with random weights and the built-in model's tokenizer.

    GPT-2's own tokenizer is on no package index. The vocabulary is filled up to GPT-2's size, so
    that every id has a text.
    """
    size = gpt.GPT2_SIZES["gpt2"]
    config = gpt.gpt2_config_json(size)
    config |= {key: builtin.config[key] for key in ("bos_token_id", "eos_token_id")}
    tensors = _random_tensors(config)
    fields = {n: f for n, f in builtin.fields.items() if n.startswith("tokenizer.")}
    unused = config["vocab_size"] - builtin.vocab_size
    for name, filler in (("tokens", filler_tokens(config, builtin.vocab_size)),
                         ("token_type", [UNUSED_TOKEN_TYPE] * unused)):  # fmt: skip
        field = fields[f"tokenizer.ggml.{name}"]
        fields[f"tokenizer.ggml.{name}"] = Field(
            [*field.value, *filler], field.kind, field.item_kind
        )
    return Checkpoint("gpt2", fields | _gpt2_fields(config), tensors, config, builtin.tokenizer_dir)


def filler_tokens(config: Mapping[str, Any], known: int) -> list[str]:
    """Return names for the ids beyond a tokenizer of `known` tokens."""
    return [f"<unused{token}>" for token in range(known, config["vocab_size"])]


def _gpt2_fields(config: Mapping[str, Any]) -> dict[str, Field]:
    from gguf import GGUFValueType

    integers = {
        "context_length": config["n_ctx"],
        "embedding_length": config["n_embd"],
        "feed_forward_length": 4 * config["n_embd"],
        "block_count": config["n_layer"],
        "attention.head_count": config["n_head"],
    }
    return {
        **{f"gpt2.{n}": Field(value, GGUFValueType.UINT32) for n, value in integers.items()},
        "gpt2.attention.layer_norm_epsilon": Field(
            config["layer_norm_epsilon"], GGUFValueType.FLOAT32
        ),
    }


def _random_tensors(config: Mapping[str, Any]) -> dict[str, Array]:
    """Return normal weights, norms of one and biases of zero."""
    random = np.random.default_rng(RANDOM_SEED)
    hidden = config["n_embd"]
    weights = {
        "token_embd": (config["vocab_size"], hidden),
        "position_embd": (config["n_ctx"], hidden),
    }
    norms = ["output_norm"]
    linears: dict[str, tuple[int, int]] = {}
    for layer in range(config["n_layer"]):
        block = f"blk.{layer}"
        norms += [f"{block}.attn_norm", f"{block}.ffn_norm"]
        linears |= {
            f"{block}.attn_qkv": (3 * hidden, hidden),
            f"{block}.attn_output": (hidden, hidden),
            f"{block}.ffn_up": (4 * hidden, hidden),
            f"{block}.ffn_down": (hidden, 4 * hidden),
        }
    tensors: dict[str, Array] = {}
    for name, shape in (weights | linears).items():
        drawn = random.standard_normal(shape, dtype=np.float32)
        tensors[f"{name}.weight"] = drawn * np.float32(STANDARD_DEVIATION)
    for name in norms:
        tensors[f"{name}.weight"] = np.ones(hidden, np.float32)
    for name, outputs in [*((n, hidden) for n in norms), *((n, s[0]) for n, s in linears.items())]:
        tensors[f"{name}.bias"] = np.zeros(outputs, np.float32)
    return tensors


# Write the compared models: a Hugging Face directory in bfloat16, and GGUFs.
#
# Every server gets the same weights at the same precision. The files are kept in the cache.

Weights = Literal["bf16", "q8_0", "q4_0", "q4_k_m"]
FILE_MODEL = "gemma3-270m"  # of gemma3, whose published file is compared as it is, in q4_k_m
# Part of the path: raise it when the written files change.
VERSION = 1


def hugging_face_directory(model: ModelName) -> Path:
    """Return a directory with config.json, the tokenizer and bfloat16 weights."""
    directory = _directory(model) / "hf"
    if not directory.is_dir():
        with scratch_directory() as scratch:
            new = scratch / "hf"
            new.mkdir()
            _write_directory(load_checkpoint(model), new)
            publish_directory(new, directory)
    return directory


def gguf_file(model: ModelName, weights: Weights) -> Path:
    """Return a GGUF with matrices in `weights` and vectors in float32.

    The embedding, which is also the output matrix, has 8 bits in a q4_0 file, as in llama.cpp's own
    q4_0 files, where it is more precise than the rest.
    """
    if model == "gemma3":
        return builtin_weights(show_progress=True, name=FILE_MODEL)
    directory = _directory(model) / weights
    if not directory.is_dir():
        with scratch_directory() as scratch:
            new = scratch / weights
            new.mkdir()
            _write_gguf(load_checkpoint(model), weights, new / "model.gguf")
            publish_directory(new, directory)
    return directory / "model.gguf"


def _directory(model: ModelName) -> Path:
    return cache_directory() / "peers" / "models" / f"{model}-{VERSION}"


# --- GGUF -----------------------------------------------------------------------------------------


def _write_gguf(checkpoint: Checkpoint, weights: Weights, path: Path) -> None:
    from gguf import GGMLQuantizationType, GGUFWriter, LlamaFileType
    from gguf.quants import quantize

    writer = GGUFWriter(path, checkpoint.architecture)
    for name, field in checkpoint.fields.items():
        if name != "general.file_type":
            writer.add_key_value(name, field.value, field.kind, field.item_kind)
    writer.add_file_type(LlamaFileType[f"MOSTLY_{weights.upper()}"])
    for name, tensor in checkpoint.tensors.items():
        kind = GGMLQuantizationType[_kind(name, tensor, weights)]
        writer.add_tensor(name, quantize(tensor, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _kind(name: str, tensor: Array, weights: Weights) -> str:
    if tensor.ndim == 1:
        return "F32"
    if weights == "bf16":
        return "F32" if name == "position_embd.weight" else "BF16"
    return "Q8_0" if name in ("token_embd.weight", "position_embd.weight") else weights.upper()


# --- Hugging Face ---------------------------------------------------------------------------------


def _write_directory(checkpoint: Checkpoint, directory: Path) -> None:
    for name in ("tokenizer_config.json", "generation_config.json"):
        shutil.copy(checkpoint.tokenizer_dir / name, directory)
    source = checkpoint.tokenizer_dir / "tokenizer.json"
    write_filled_tokenizer(source, checkpoint.config, directory / "tokenizer.json")
    config = {**checkpoint.config, "dtype": "bfloat16"}
    (directory / "config.json").write_text(json.dumps(config, indent=1))
    _write_safetensors(dict(_hf_tensors(checkpoint)), directory / "model.safetensors")


def write_filled_tokenizer(source: Path, config: Mapping[str, Any], path: Path) -> None:
    """Write a tokenizer.json with a token for every id of a model's vocabulary."""
    tokenizer = json.loads(source.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    known = len(vocabulary)
    for token_id, token in enumerate(filler_tokens(config, known), known):
        vocabulary[token] = token_id
    path.write_text(json.dumps(tokenizer, ensure_ascii=False))


def _write_safetensors(tensors: dict[str, Array], path: Path) -> None:
    """Write tensors in bfloat16, a type that numpy does not have, from their bits."""
    from gguf import GGMLQuantizationType
    from gguf.quants import quantize
    from safetensors import TensorSpec, serialize_file

    kept = {
        name: np.ascontiguousarray(quantize(np.ascontiguousarray(t), GGMLQuantizationType.BF16))
        for name, t in tensors.items()
    }
    specs = {
        name: TensorSpec(
            dtype="bfloat16",
            shape=tensors[name].shape,
            data_ptr=bits.ctypes.data,
            data_len=bits.nbytes,
        )
        for name, bits in kept.items()
    }
    serialize_file(specs, path, {"format": "pt"})


_HF_PARTS = {
    "llama": (
        ("model.embed_tokens", "model.norm"),
        "model.layers",
        ("input_layernorm", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj",
         "self_attn.o_proj", "post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj",
         "mlp.down_proj"),
    ),
    "gpt2": (
        ("transformer.wte", "transformer.wpe", "transformer.ln_f"),
        "transformer.h",
        ("ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj"),
    ),
}  # fmt: skip


def _hf_tensors(checkpoint: Checkpoint) -> Iterator[tuple[str, Array]]:
    from gguf import MODEL_ARCH, get_tensor_name_map

    layers = checkpoint.config.get("num_hidden_layers") or checkpoint.config["n_layer"]
    names = get_tensor_name_map(MODEL_ARCH[checkpoint.architecture.upper()], layers)
    for module in _hf_modules(checkpoint.architecture, layers):
        for kind in ("weight", "bias"):
            tensor = checkpoint.tensors.get(f"{names.get_name(module)}.{kind}")
            if tensor is not None:
                yield f"{module}.{kind}", _as_in_hf(module, tensor, checkpoint.config)


def _hf_modules(architecture: str, layers: int) -> list[str]:
    whole, blocks, parts = _HF_PARTS[architecture]
    return [*whole, *(f"{blocks}.{layer}.{part}" for layer in range(layers) for part in parts)]


def _as_in_hf(module: str, tensor: Array, config: Any) -> Array:
    """Return a tensor in Hugging Face's layout.

    GPT-2's matrices are [inputs, outputs]. Llama's rotary pairs are half a head apart in Hugging
    Face's layout, and adjacent in GGUF's.
    """
    if ".c_" in module:
        return np.transpose(tensor)
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
    kind = module.rpartition(".")[2]
    if kind not in heads:
        return tensor
    count = config[heads[kind]]
    pairs = tensor.reshape(count, tensor.shape[0] // count // 2, 2, -1)
    adjacent: Array = pairs.swapaxes(1, 2).reshape(tensor.shape)
    return adjacent


def write_random_weights(source: Path, directory: Path) -> None:
    """Write a model with the config.json and tokenizer of a directory, in bfloat16."""
    import torch
    import transformers

    library: Any = transformers
    torch.manual_seed(0)
    config = library.AutoConfig.from_pretrained(source)
    model = library.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(directory)
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copy(source / name, directory)
    write_filled_tokenizer(
        source / "tokenizer.json", config.to_dict(), directory / "tokenizer.json"
    )
