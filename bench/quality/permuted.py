"""Write the built-in model with permuted channels: `python -m bench.quality.permuted DIRECTORY`.

The built-in model's weights were rounded to 4 bits in groups of 32 inputs, and a quantizer that
finds these groups again loses nothing. After a permutation of the hidden channels, of each MLP's
inner channels and of each value head's channels, the model computes the same, but the weights that
shared a scale are spread over many groups, as in a model that was never rounded.
"""

import json
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from bench.command import command_parser
from bench.models.files import hugging_face_directory

SEED = 0
READS_HIDDEN = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "embed_tokens", "lm_head")
WRITES_HIDDEN = ("o_proj", "down_proj")


@dataclass(frozen=True, slots=True)
class Heads:
    """Numbers of query heads and value heads, and channels of a head."""

    queries: int
    values: int
    dim: int


def permuted(tensors: dict[str, Tensor], config: dict[str, Any]) -> dict[str, Tensor]:
    """Return a Llama's tensors with its channels permuted.

    Args:
        tensors: By Hugging Face's names, without biases.
        config: Contents of config.json.
    """
    torch.manual_seed(SEED)
    query_heads, hidden_size = config["num_attention_heads"], config["hidden_size"]
    heads = Heads(query_heads, config["num_key_value_heads"], hidden_size // query_heads)
    layers = range(config["num_hidden_layers"])
    hidden = torch.randperm(hidden_size)
    inner = [torch.randperm(config["intermediate_size"]) for _ in layers]
    values = [_in_heads(heads) for _ in layers]
    changed = {}
    for name, tensor in tensors.items():
        _, _, rest = name.partition("model.layers.")
        layer = int(rest.partition(".")[0]) if rest else 0
        kind = name.split(".")[-2]
        if kind in READS_HIDDEN or tensor.dim() == 1:
            tensor = tensor[..., hidden]
        elif kind in WRITES_HIDDEN:
            tensor = tensor[hidden]
        if kind in ("gate_proj", "up_proj"):
            tensor = tensor[inner[layer]]
        elif kind == "down_proj":
            tensor = tensor[:, inner[layer]]
        elif kind == "v_proj":
            tensor = tensor[values[layer]]
        elif kind == "o_proj":
            tensor = tensor[:, _attended(values[layer], heads)]
        changed[name] = tensor.contiguous()
    return changed


def _in_heads(heads: Heads) -> Tensor:
    """Return a permutation [values * dim] that keeps each channel in its head."""
    return torch.cat([torch.randperm(heads.dim) + n * heads.dim for n in range(heads.values)])


def _attended(values: Tensor, heads: Heads) -> Tensor:
    """Return the permutation [queries * dim] of what is attended with permuted values."""
    within = values.view(heads.values, 1, heads.dim) % heads.dim
    first = torch.arange(heads.queries).view(heads.values, -1, 1) * heads.dim
    return (within + first).flatten()


def write_permuted(directory: Path) -> None:
    """Write the permuted model to a directory."""
    source = hugging_face_directory("smollm2")
    shutil.copytree(source, directory, dirs_exist_ok=True)
    config = json.loads((source / "config.json").read_text())
    for file in directory.glob("*.safetensors"):
        save_file(permuted(load_file(file), config), file)


def main(argv: Sequence[str] | None = None) -> int:
    """Write the model and return 0."""
    parser = command_parser("bench.quality.permuted", __doc__)
    parser.add_argument("directory", type=Path)
    write_permuted(parser.parse_args(argv).directory)
    return 0


if __name__ == "__main__":
    sys.exit(main())
