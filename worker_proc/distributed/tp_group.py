"""The processes that share one model, each with a part of every layer.

Tensor parallelism (Shoeybi et al. 2019, https://arxiv.org/abs/1909.08053): the heads of a layer and
the columns of its MLP are split over the ranks, and the results of the two projections back into
the residual stream are summed over them. Embedding and head are on every rank. So each rank has all
logits and samples every token itself, and needs no messages but the plans, at the cost of reading
the whole head.
"""

import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from worker_proc.loading.sharding import TPRank

# Covers loading the slowest part of the model. TPLeader notices a dead rank much earlier.
TIMEOUT = timedelta(minutes=10)


class TPGroup:
    """This process's connection to the other ranks.

    All ranks must make the same calls in the same order.
    """

    def __init__(self, rank: TPRank, store: Path, device: torch.device) -> None:
        """Wait until all ranks have joined, who find each other by the new file `store`."""
        self._device = device
        if sys.platform == "linux":
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # not reachable from the network
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            init_method=f"file://{store}",
            rank=rank.rank,
            world_size=rank.count,
            timeout=TIMEOUT,
            device_id=device if device.type == "cuda" else None,
        )

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum `x` over all ranks in place. Each rank gets the same bits."""
        dist.all_reduce(x)
        return x

    def all_reduce_min(self, number: int) -> int:
        """Return the minimum of `number` over all ranks."""
        numbers = torch.tensor([number], device=self._device)
        dist.all_reduce(numbers, dist.ReduceOp.MIN)
        return int(numbers)
