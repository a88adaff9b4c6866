"""The processes that share one model, each with a part of every layer.

Tensor parallelism (Shoeybi et al. 2019, https://arxiv.org/abs/1909.08053): the heads of a layer and
the columns of its MLP are split over the ranks, and the results of the two projections back into
the residual stream are summed over them. Embedding and head are on every rank. So each rank has all
logits and samples every token itself, and needs no messages but the plans, at the cost of reading
the whole head.
"""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from worker_proc.distributed.rendezvous import Rendezvous
from worker_proc.loading.sharding import TPRank
from worker_proc.models.transfer import DeviceToHostCopier, Fetch, TokenIds

# Covers loading the slowest part of the model. TPLeader notices a dead rank much earlier.
TIMEOUT = timedelta(minutes=10)
CHECK_STEPS = 64  # between two comparisons of the ranks' tokens


class TPGroup:
    """This process's connection to the other ranks.

    All ranks must make the same calls in the same order.
    """

    def __init__(self, rank: TPRank, meeting: Rendezvous, device: torch.device) -> None:
        """Wait until all ranks have joined."""
        self._device = device
        self._num_checked = 0
        self._copier = DeviceToHostCopier(device)
        self._difference: Fetch | None = None
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            rank=rank.rank,
            world_size=rank.count,
            timeout=TIMEOUT,
            device_id=device if device.type == "cuda" else None,
            **meeting.begin(rank, TIMEOUT),
        )

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum `x` over all ranks in place. Each rank gets the same bits."""
        dist.all_reduce(x)
        return x

    def check_tokens(self, token_ids: TokenIds) -> None:
        """Compare the tokens that the ranks have sampled, each by itself, every CHECK_STEPS steps.

        The result is read at the next comparison, so that nothing waits for it.

        Args:
            token_ids: `[rows]` of this rank.

        Raises:
            RuntimeError: the ranks had different tokens, so their keys are of different texts.
        """
        self._num_checked += 1
        if self._num_checked % CHECK_STEPS:
            return
        if self._difference is not None and self._difference().any():
            raise RuntimeError(
                "the ranks of --tp sampled different tokens: their GPUs do not compute alike;"
                " use GPUs of one kind, or start with --tp 1"
            )
        tokens = torch.as_tensor(token_ids, device=self._device)
        weights = torch.arange(1, 2 * len(tokens), 2, device=self._device)
        checksum = (tokens * weights).sum()
        extremes = torch.stack((checksum, -checksum))
        dist.all_reduce(extremes, dist.ReduceOp.MAX)
        self._difference = self._copier.begin(extremes.sum().unsqueeze(0))

    def all_reduce_min(self, number: int) -> int:
        """Return the minimum of `number` over all ranks."""
        numbers = torch.tensor([number], device=self._device)
        dist.all_reduce(numbers, dist.ReduceOp.MIN)
        return int(numbers)
