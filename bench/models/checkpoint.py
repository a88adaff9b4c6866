"""Load the compared models: float32 tensors under GGUF's names and in its layouts."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from quadriga.model_files import gpt2_sizes
from quadriga.model_files.builtin.fetch import builtin_weights
from quadriga.model_files.gguf_header import header_files, make_config

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
        architecture: Architecture in GGUF.
        fields: Metadata of the GGUF, without the architecture.
        tensors: Tensors by their names in GGUF.
        config: Hugging Face's config.json.
        tokenizer_dir: Directory of tokenizer.json; its vocabulary may be smaller than the model's.
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
    size = gpt2_sizes.SIZES["gpt2"]
    config = gpt2_sizes.hugging_face_config(size)
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
