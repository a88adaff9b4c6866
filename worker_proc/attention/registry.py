"""Attention backends by the name that --attention-backend takes."""

import torch

from quadriga.errors import ConfigError
from worker_proc.attention.base import AttentionBackend, AttentionShape
from worker_proc.attention.torch_reference import TorchAttention

BACKENDS = {"torch": TorchAttention}


def make_attention(
    name: str,
    shape: AttentionShape,
    num_pages: int,
    page_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> AttentionBackend:
    """Raise ConfigError for a name that nobody knows."""
    if name not in BACKENDS:
        raise ConfigError(
            f"attention_backend is {name!r}: it must be one of {', '.join(sorted(BACKENDS))}"
        )
    return BACKENDS[name](shape, num_pages, page_size, dtype, device)
