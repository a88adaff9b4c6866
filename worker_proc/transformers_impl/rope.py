"""Keep the rotary frequencies of a model of transformers the same in every step.

With the scaling type `longrope`, transformers chooses the frequencies in each forward pass by the
largest position in it: here, by that of any request in the step. (`dynamic` changes them only
beyond `max_position_embeddings`, which a context never exceeds.)
"""

from typing import Any

import torch
from torch import nn


def fix_rope(model: nn.Module, context_length: int) -> None:
    """Fix the frequencies of `longrope` to those of the longest sequence of a context."""
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        if isinstance(kinds, str):
            module.rope_type = _fix(module, kinds, context_length, {})  # type: ignore[assignment]
        elif isinstance(kinds, dict):
            for layer_type, kind in kinds.items():
                kinds[layer_type] = _fix(module, kind, context_length, {"layer_type": layer_type})


def _fix(module: Any, kind: str, context_length: int, layer_type: dict[str, str]) -> str:
    """Return the type that leaves the frequencies as they are now."""
    if kind != "longrope":
        return kind
    device = next(iter(module.buffers())).device
    last = torch.tensor([[context_length - 1]], device=device)
    module(torch.zeros(1, 1, 1, device=device), last, **layer_type)
    return "default"
