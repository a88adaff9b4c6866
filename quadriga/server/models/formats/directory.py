"""Check of a model directory, with a remedy for each missing file."""

import codecs
import json
from pathlib import Path
from typing import Any

from quadriga import disk
from quadriga.errors import ModelError

# Defaults of transformers' Gemma3TextConfig, which the published files leave out.
_GEMMA3_TEXT = {
    "model_type": "gemma3_text",
    "vocab_size": 262208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131072,
}
ADAPTER_CONFIG = "adapter_config.json"
WEIGHT_INDEX = "model.safetensors.index.json"
_SLOW_TOKENIZERS = ("tokenizer.model", "vocab.json", "spiece.model", "vocab.txt")


def find_problem(directory: Path, weights: bool, tokenizer: bool) -> str | None:
    """Return what is missing and the remedy, worded to follow the directory's name; or None.

    Args:
        directory: the model's directory.
        weights: it must have weights.
        tokenizer: it must have a tokenizer.
    """
    if (directory / ADAPTER_CONFIG).is_file() and not (directory / "config.json").is_file():
        base = read_json(directory / ADAPTER_CONFIG).get("base_model_name_or_path") or "its model"
        return f"is an adapter of {base}: serve that model with --lora-modules NAME={directory}"
    if not (directory / "config.json").is_file():
        ggufs = sorted(directory.glob("*.gguf"))
        if ggufs:
            return f"has no config.json; to serve its GGUF type --model {ggufs[0]}"
        return "has no config.json: it is not a model's directory"
    if tokenizer and not (directory / "tokenizer.json").is_file():
        return _tokenizer_problem(directory)
    return _weights_problem(directory) if weights else None


def read_config(directory: Path) -> dict[str, Any]:
    """Return a config.json; of a Gemma 3 for texts and images, the part of its text model.

    Raises:
        ModelError: the file is broken.
    """
    config = read_json(directory / "config.json")
    text = config.get("text_config")
    if config.get("model_type") != "gemma3" or not isinstance(text, dict):
        return config
    shared = {key: value for key, value in config.items() if not key.endswith("_config")}
    return {**shared, **_GEMMA3_TEXT, **text}


def has_code(directory: Path) -> bool:
    """Return whether a directory has the modules that its config.json names for transformers."""
    auto_map = read_json(directory / "config.json").get("auto_map") or {}
    classes = [auto_map.get(key) for key in ("AutoConfig", "AutoModelForCausalLM")]
    modules = {str(name).partition(".")[0] for name in classes if name and "--" not in str(name)}
    return all((directory / f"{module}.py").is_file() for module in modules)


def read_text(path: Path) -> str:
    """Return the text of a file in UTF-8, or in UTF-16 or UTF-32 with a byte order mark.

    Raises:
        ModelError: there is no such file, or it cannot be read.
    """
    try:
        data = disk.read_bytes(path)
        if data.startswith((codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE)):
            return data.decode("utf-32")
        if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            return data.decode("utf-16")
        return data.decode("utf-8-sig")
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ModelError(
            f"cannot read {path}: byte {error.start} is no {error.encoding}; fetch the file again"
        ) from None


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file, {} without a file. Raise ModelError if it is broken."""
    if not path.exists():
        return {}
    text = read_text(path)
    if not text.strip():
        raise ModelError(f"cannot read {path}: it is empty; fetch the file again")
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"cannot read {path}: {error}; fetch the file again") from None
    if not isinstance(content, dict):
        raise ModelError(
            f"cannot read {path}: it holds {text.strip()!r:.40}, and should hold an object; fetch"
            " the file again"
        )
    return content


def indexed_shards(directory: Path) -> list[Path]:
    """Return the weight files that a directory's index names; empty without an index.

    Raises:
        ModelError: the index is broken, or names something else than files of the directory.
    """
    path = directory / WEIGHT_INDEX
    if not path.exists():
        return []
    shards = read_json(path).get("weight_map")
    wanted = "a map of tensors to files in this directory"
    if not isinstance(shards, dict) or not shards:
        raise ModelError(
            f"cannot read {path}: weight_map is {shards!r:.80}, and should be {wanted}"
        )
    for tensor, shard in shards.items():
        if not isinstance(shard, str) or not shard or Path(shard).name != shard:
            raise ModelError(
                f"cannot read {path}: weight_map.{tensor} is {shard!r:.80}, and should be {wanted}"
            )
    return [directory / shard for shard in sorted(set(shards.values()))]


def _tokenizer_problem(directory: Path) -> str:
    slow = [name for name in _SLOW_TOKENIZERS if (directory / name).is_file()]
    if not slow:
        return (
            "has no tokenizer.json; name one with --tokenizer, a directory or a Hub id that has it"
        )
    return (
        f"has a slow tokenizer only ({slow[0]}) and no tokenizer.json; make one with transformers:"
        " AutoTokenizer.from_pretrained(directory).save_pretrained(directory), or name another"
        " model's with --tokenizer"
    )


def _weights_problem(directory: Path) -> str | None:
    shards = indexed_shards(directory)
    if shards:
        missing = [shard.name for shard in shards if not shard.is_file()]
        return f"lacks {len(missing)} weight files ({missing[0]}, ...)" if missing else None
    if found := list(directory.glob("*.safetensors")):
        others = [path.name for path in found if not path.is_file()]
        return f"has {others[0]}, which is not a regular file" if others else None
    return (
        "has no *.safetensors weights (other formats are not read); for random weights add"
        " --load-format dummy"
    )
