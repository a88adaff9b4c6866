"""Build the model of a config.json."""

from typing import Any

import torch

from quadriga.model_files.architectures import read_architecture
from worker_proc.models.base import Model
from worker_proc.models.decoder import Decoder


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
            return Decoder(read_architecture(config), tp_size)
    finally:
        torch.set_default_dtype(previous)
