"""A GGUF's header, converted once to the files of a Hugging Face directory.

The conversion can take seconds, since the header holds the whole vocabulary; reading the files
does not. Source: the GGUF specification (ggml, docs/gguf.md).
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from quadriga.errors import ModelError
from quadriga.model_files.cache import cache_directory, publish_directory, scratch_directory
from quadriga.model_files.gguf.gemma import gemma2_config, gemma3_config
from quadriga.model_files.gguf.llama_variants import gemma_values, granite_values, olmo2_values
from quadriga.model_files.gguf.parts import first_file, gguf_files, read_whole_header
from quadriga.model_files.gguf.phi3 import phi3_config
from quadriga.model_files.gguf.reader import GGUFHeader, TensorIndex, read_float32
from quadriga.model_files.gguf.starcoder2 import starcoder2_config
from quadriga.model_files.gguf_rope import ROPE_TENSORS, rope_scaling
from quadriga.model_files.gguf_start import read_architecture_name
from quadriga.model_files.gguf_tokenizer import end_token_ids, write_tokenizer

# Part of the cache key: increase it when the written files change.
EXPORT_VERSION = 6
# Architectures in which a part of each head may be rotated.
PARTLY_ROTATED = ("phi3",)
# Keys of llama.cpp that change what a model computes -> their values that change nothing.
NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "attention.output_scale": (0, 1),
    "attention.scale": (0,),
    "attention.shared_kv_layers": (0,),
    "attention.sliding_window": (0,),
    "attention.temperature_length": (0,),
    "attention.temperature_scale": (0,),
    "attention.value_scale": (0, 1),
    "attn_logit_softcapping": (0,),
    "deepstack_mapping": (-1,),
    "embedding_scale": (0, 1),
    "expert_shared_feed_forward_length": (0,),
    "final_logit_softcapping": (0,),
    "logit_scale": (0, 1),
    "nextn_predict_layers": (0,),
    "residual_scale": (0, 1),
    "rope.dimension_sections": (0,),
    "rope.scaling.alpha": (0,),
}
# Tensors with a row for each id. The model has the ids that all of them have.
VOCABULARY_TENSORS = ("token_embd.weight", "output.weight")


def header_files(path: Path) -> Path:
    """Return the directory of a GGUF's converted header, and make it if it does not exist.

    Of a split GGUF, `path` is any part.

    It holds config.json, generation_config.json, tokenizer.json, tokenizer_config.json and
    tensors.json, the tensor index with the GGUF's names.

    Raises:
        ModelError: the file cannot be used.
    """
    path = first_file(path)
    directory = cache_directory() / "gguf-headers" / _key(path)
    if not directory.is_dir():
        with scratch_directory() as scratch:
            header = scratch / "header"
            header.mkdir()
            _export(path, header)
            publish_directory(header, directory)
    return directory


def _key(path: Path) -> str:
    states = [file.stat() for file in gguf_files(path)]  # links have the names of the parts
    path = path.resolve()
    identity = " ".join(
        [f"{EXPORT_VERSION} {path}", *(f"{state.st_size} {state.st_mtime_ns}" for state in states)]
    )
    return f"{path.stem}-{hashlib.sha256(identity.encode()).hexdigest()[:16]}"


def _export(path: Path, directory: Path) -> None:
    _check_architecture(path)
    header = read_whole_header(path)
    metadata, tensors = header.metadata, header.tensors
    try:
        config = make_config(metadata, tensors, rope_divisors_of(path, header))
        write_tokenizer(metadata, directory)
    except KeyError as error:
        raise ModelError(f"{path} lacks {error}: it is not a complete GGUF model") from None
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from None
    generation = {"eos_token_id": end_token_ids(metadata), **_sampling(metadata)}
    for name, content in (
        ("config.json", config),
        ("generation_config.json", generation),
        ("tensors.json", tensors),
    ):
        (directory / name).write_text(json.dumps(content, indent=1), encoding="utf-8")


def _sampling(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the recommended sampling parameters, by their names in generation_config.json."""
    names = {
        "temp": "temperature",
        "top_k": "top_k",
        "top_p": "top_p",
        "min_p": "min_p",
        "penalty_repeat": "repetition_penalty",
    }
    given = {name: metadata.get(f"general.sampling.{key}") for key, name in names.items()}
    return {
        name: _decimal(value) if isinstance(value, float) else value
        for name, value in given.items()
        if value is not None
    }


def _check_architecture(path: Path) -> None:
    """Raise ModelError for an unsupported architecture, before the vocabulary is read."""
    architecture = read_architecture_name(path)
    if architecture is not None and architecture not in _CONFIGS:
        raise ModelError(f"{path}: {_unsupported(architecture)}")


def _unsupported(architecture: str) -> str:
    return (
        f"general.architecture is {architecture!r}, which is not supported in a GGUF (supported:"
        f" {', '.join(_CONFIGS)}); take a model of one of these"
    )


def rope_divisors_of(path: Path, header: GGUFHeader) -> dict[str, list[float]]:
    """Return the values of the tensors that scale rotary positions."""
    files = gguf_files(path)
    return {
        name: read_float32(files[entry.get("part", 0)], entry)
        for name, entry in header.tensors.items()
        if name in ROPE_TENSORS
    }


def make_config(
    metadata: Mapping[str, Any],
    tensors: TensorIndex,
    rope_divisors: Mapping[str, list[float]],
) -> dict[str, Any]:
    """Return config.json with Hugging Face's keys.

    Raises:
        ModelError: the forward pass of this model would be wrong.
    """
    architecture = metadata["general.architecture"]
    if architecture not in _CONFIGS:
        raise ModelError(_unsupported(architecture))
    values = _KeysRead(
        {
            name.removeprefix(f"{architecture}."): value
            for name, value in metadata.items()
            if name.startswith(f"{architecture}.")
        }
    )
    if values.get("expert_count", 0) > 0:
        raise ModelError("mixture-of-experts models are not supported")
    config = _CONFIGS[architecture](values, tensors)
    _check_head_sizes(architecture, values)
    config |= rope_scaling(values, rope_divisors)
    _refuse_ignored(architecture, values)
    rows = (tensors[name]["shape"][0] for name in VOCABULARY_TENSORS if name in tensors)
    config["vocab_size"] = min(tensors["token_embd.weight"]["shape"][0], *rows)
    config["tie_word_embeddings"] = "output.weight" not in tensors
    for role in ("bos", "eos"):
        if (token_id := metadata.get(f"tokenizer.ggml.{role}_token_id")) is not None:
            config[f"{role}_token_id"] = token_id
    return config


class _KeysRead(dict[str, Any]):
    """An architecture's metadata without its prefix, which remembers the keys that were read."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__(values)
        self.read: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self.read.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        """Return a value, or `default` without one."""
        self.read.add(key)
        return super().get(key, default)


def _check_head_sizes(architecture: str, values: _KeysRead) -> None:
    """Raise ModelError if values, or heads of layers with a window, have another size."""
    if "attention.head_count" not in values:
        return
    head_dim = values.get("attention.key_length") or (
        values["embedding_length"] // values["attention.head_count"]
    )
    rotated = values.get("rope.dimension_count") or head_dim
    for name, allowed in (
        ("attention.value_length", head_dim),
        ("attention.key_length_swa", head_dim),
        ("attention.value_length_swa", head_dim),
        ("rope.dimension_count", rotated if architecture in PARTLY_ROTATED else head_dim),
        ("rope.dimension_count_swa", rotated),
    ):
        if (value := values.get(name) or allowed) != allowed:
            raise ModelError(
                f"{architecture}.{name} = {value} is not supported; supported: {allowed}"
            )


def _refuse_ignored(architecture: str, values: _KeysRead) -> None:
    """Raise ModelError for a key that would change the logits, and that nothing has read."""
    for name, neutral in NEUTRAL_VALUES.items():
        value = values.get(name) if name not in values.read else None
        for item in value if isinstance(value, list) else [value]:
            if item is not None and item not in neutral:
                shown = ", ".join(str(allowed) for allowed in neutral)
                raise ModelError(
                    f"{architecture}.{name} = {item} is not supported for this architecture;"
                    f" supported: {shown}"
                )


def _llama_config(values: Mapping[str, Any], tensors: TensorIndex) -> dict[str, Any]:
    """Return the config of a Llama; of a Mistral, if there is a window."""
    window = values.get("attention.sliding_window", 0)
    if not window:
        return _like_llama("Llama", values, tensors)
    return _like_llama("Mistral", values, tensors) | {"sliding_window": window}


def _like_llama(name: str, values: Mapping[str, Any], tensors: TensorIndex) -> dict[str, Any]:
    """Return the config of Llama or of an architecture with the same keys."""
    heads = values["attention.head_count"]
    return {
        "model_type": name.lower(),
        "architectures": [f"{name}ForCausalLM"],
        "num_hidden_layers": values["block_count"],
        "hidden_size": values["embedding_length"],
        "intermediate_size": values["feed_forward_length"],
        "num_attention_heads": heads,
        "num_key_value_heads": values.get("attention.head_count_kv", heads),
        "head_dim": values.get("attention.key_length", values["embedding_length"] // heads),
        "rope_theta": _decimal(values.get("rope.freq_base", 10000.0)),
        "rms_norm_eps": _decimal(values["attention.layer_norm_rms_epsilon"]),
        "max_position_embeddings": values["context_length"],
        "hidden_act": "silu",
        "attention_bias": "blk.0.attn_output.bias" in tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in tensors,
    }


def _variant(
    name: str,
    own_values: Callable[[Mapping[str, Any]], dict[str, Any]],
    values: Mapping[str, Any],
    tensors: TensorIndex,
) -> dict[str, Any]:
    """Return the config of an architecture with Llama's keys and some of its own."""
    return _like_llama(name, values, tensors) | own_values(values)


def _gpt2_config(values: Mapping[str, Any], _: TensorIndex) -> dict[str, Any]:
    return {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "n_layer": values["block_count"],
        "n_embd": values["embedding_length"],
        "n_inner": values["feed_forward_length"],
        "n_head": values["attention.head_count"],
        "n_positions": values["context_length"],
        "n_ctx": values["context_length"],
        "layer_norm_epsilon": _decimal(values["attention.layer_norm_epsilon"]),
        "activation_function": "gelu_new",
    }


_CONFIGS: dict[str, Callable[[Mapping[str, Any], TensorIndex], dict[str, Any]]] = {
    "llama": _llama_config,
    "qwen2": partial(_like_llama, "Qwen2"),
    "qwen3": partial(_like_llama, "Qwen3"),
    "gpt2": _gpt2_config,
    "gemma2": gemma2_config,
    "gemma3": gemma3_config,
    "gemma": partial(_variant, "Gemma", gemma_values),
    "granite": partial(_variant, "Granite", granite_values),
    "olmo2": partial(_variant, "Olmo2", olmo2_values),
    "smollm3": partial(_like_llama, "SmolLM3"),
    "phi3": phi3_config,
    "starcoder2": starcoder2_config,
}


def _decimal(value: float) -> float:
    """Return the decimal number of a float32: GGUF stores 1e-05 as 9.999999747378752e-06."""
    return float(f"{value:.7g}")
