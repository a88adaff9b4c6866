"""Keep the rotary frequencies of a model of transformers the same in every step.

transformers chooses the frequencies of two scaling types anew in each forward pass, by the largest
position in it: here, by that of any request in the step.
"""

from typing import Any

import torch
from torch import nn

from quadriga.errors import ModelError


def fix_rope(model: nn.Module, context_length: int) -> None:
    """Fix the frequencies of `longrope` for a context, and check those of `dynamic`.

    Raises:
        ModelError: The frequencies would depend on the length of each sequence.
    """
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        if isinstance(kinds, str):
            module.rope_type = _fix(module, kinds, context_length, {})  # type: ignore[assignment]
        elif isinstance(kinds, dict):
            for layer_type, kind in kinds.items():
                kinds[layer_type] = _fix(module, kind, context_length, {"layer_type": layer_type})


def _fix(module: Any, kind: str, context_length: int, layer_type: dict[str, str]) -> str:
    """Return the type that leaves the frequencies as they are now."""
    if "dynamic" in kind and context_length > module.original_max_seq_len:
        raise ModelError(
            f"its rope_type is 'dynamic', whose frequencies depend on the sequence's length above"
            f" {module.original_max_seq_len} tokens, and the context is {context_length}; start"
            f" with --context-length {module.original_max_seq_len}"
        )
    if kind == "longrope":
        device = next(iter(module.buffers())).device
        last = torch.tensor([[context_length - 1]], device=device)
        module(torch.zeros(1, 1, 1, device=device), last, **layer_type)
        return "default"
    return kind
