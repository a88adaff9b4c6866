"""The processes that share one model, each with a part of every layer (tensor parallelism; Shoeybi
et al. 2019, https://arxiv.org/abs/1909.08053).

A layer's heads, and the numbers inside its MLP, are dealt out; what comes out of each rank's part
of the two projections back into the residual stream is added up. The embedding and the head are on
every rank: so each has all logits, chooses every token by itself, and needs to be told nothing but
the plans, at the price of reading the whole head.
"""

import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from quadriga.config.worker_args import WorkerArgs
from quadriga.model_files.resolve import ModelFiles
from worker_proc.loading.sharding import TPRank
from worker_proc.models.registry import build_model
from worker_proc.system.devices import choose_device

TIMEOUT = timedelta(minutes=10)
"""For the others to load their parts. A dead rank is found out by other means."""


class TPGroup:
    """This process among those that share a model. Every call must be made by all of them, in the
    same order."""

    def __init__(self, part: TPRank, store: Path, device: torch.device) -> None:
        """Waits for the others, who find each other by a file that is not there yet."""
        self.part = part
        self._device = device
        if sys.platform == "linux":
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # nobody else is to hear it
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            init_method=f"file://{store}",
            rank=part.rank,
            world_size=part.count,
            timeout=TIMEOUT,
            device_id=device if device.type == "cuda" else None,
        )

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of everybody's x, in place, the same bits on each rank."""
        dist.all_reduce(x)
        return x

    def least(self, number: int) -> int:
        """Of everybody's."""
        numbers = torch.tensor([number], device=self._device)
        dist.all_reduce(numbers, dist.ReduceOp.MIN)
        return int(numbers)


def check_ranks(args: WorkerArgs, files: ModelFiles) -> None:
    """ConfigError where there are not enough devices, or the model cannot be shared out."""
    choose_device(args.device, args.tp - 1)
    build_model(files.config, tp_size=args.tp)
