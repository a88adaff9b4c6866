"""Which engine computes on this machine."""

import torch

from quadriga.config import WorkerArgs
from worker_proc.attention.registry import make_attention
from worker_proc.engine import Engine
from worker_proc.models.base import Model
from worker_proc.torch_engine import TorchEngine


def make_engine(
    args: WorkerArgs, model: Model, num_pages: int, dtype: torch.dtype, device: torch.device
) -> Engine:
    attention = make_attention(
        args.attention_backend, model.attention_shape, num_pages, args.page_size, dtype, device
    )
    return TorchEngine(model, attention)
