"""Files of sentence-transformers' modules beside a tiny model."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

MODELS = "sentence_transformers.models."
TRANSFORMER: dict[str, Any] = {"path": "", "type": MODELS + "Transformer"}
POOLING: dict[str, Any] = {"path": "1_Pooling", "type": MODELS + "Pooling"}
DENSE: dict[str, Any] = {"type": MODELS + "Dense"}
NORMALIZE: dict[str, Any] = {"path": "9_Normalize", "type": MODELS + "Normalize"}


def write_json(path: Path, content: object) -> None:
    """Write a JSON file and the directory that it is in."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(content))


def write_modules(directory: Path, dense: Sequence[dict[str, Any]]) -> None:
    """Add modules to a model's directory: the mean, Dense ones with random weights, a norm.

    Args:
        directory: of the model.
        dense: the config.json of each module Dense.
    """
    named = [f"{2 + number}_Dense" for number in range(len(dense))]
    modules = [TRANSFORMER, POOLING, *(DENSE | {"path": path} for path in named), NORMALIZE]
    numbered = [{"idx": n, "name": str(n), **module} for n, module in enumerate(modules)]
    write_json(directory / "modules.json", numbered)
    write_json(directory / "1_Pooling" / "config.json", {"pooling_mode_mean_tokens": True})
    generator = torch.Generator().manual_seed(1)
    for path, config in zip(named, dense, strict=True):
        write_json(directory / path / "config.json", config)
        sizes = [int(config.get(key) or 1) for key in ("out_features", "in_features")]
        tensors = {"linear.weight": torch.randn(sizes, generator=generator) * 0.3}
        if config.get("bias", True):
            tensors["linear.bias"] = torch.randn(sizes[0], generator=generator)
        save_file(tensors, directory / path / "model.safetensors")
