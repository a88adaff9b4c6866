"""Find and build the architecture that a config.json names."""

from typing import Any

import torch

from quadriga.model_files.architectures import find_architecture
from worker_proc.models.base import Model
from worker_proc.models.gemma2 import Gemma2
from worker_proc.models.gemma3 import Gemma3
from worker_proc.models.gpt2 import GPT2
from worker_proc.models.llama import Llama, Qwen2, Qwen3

ARCHITECTURES: dict[str, type[Model]] = {
    "gemma2": Gemma2,
    "gemma3": Gemma3,
    "gemma3_text": Gemma3,
    "gpt2": GPT2,
    "llama": Llama,
    "mistral": Llama,
    "qwen2": Qwen2,
    "qwen3": Qwen3,
}


def build_model(
    config: dict[str, Any],
    dtype: torch.dtype = torch.float32,
    device: torch.device = torch.device("meta"),  # noqa: B008 (never changed)
    tp_size: int = 1,
) -> Model:
    """Build the model of a config.json, or one rank's part of it, with uninitialised weights.

    On the meta device, the weights have no storage.

    Raises:
        ModelError: The architecture is not supported.
        ConfigError: The model cannot be split over `tp_size` ranks.
    """
    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            return ARCHITECTURES[find_architecture(config)](config, tp_size)
    finally:
        torch.set_default_dtype(previous)
