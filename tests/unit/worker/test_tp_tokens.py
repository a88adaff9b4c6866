"""Ranks of tensor parallelism that sample different tokens, with a stand-in for the network."""

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from worker_proc.distributed.rendezvous import FileRendezvous
from worker_proc.distributed.tp_group import CHECK_STEPS, TPGroup
from worker_proc.loading.sharding import TPRank


def group(monkeypatch: pytest.MonkeyPatch, other: list[int]) -> TPGroup:
    """Return a group whose other rank samples the tokens `other`."""
    checksum = sum(token * (2 * row + 1) for row, token in enumerate(other))

    def all_reduce(x: torch.Tensor, how: object) -> None:
        assert how == dist.ReduceOp.MAX
        x.copy_(torch.maximum(x, torch.tensor([checksum, -checksum])))

    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: None)
    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    return TPGroup(TPRank(0, 2), FileRendezvous(Path("unused")), torch.device("cpu"))


def test_equal_tokens_are_never_complained_of(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = group(monkeypatch, [7, 2, 9])
    for _ in range(3 * CHECK_STEPS):
        ranks.check_tokens(np.array([7, 2, 9]))


@pytest.mark.parametrize("tokens", [[7, 3, 9], [2, 7, 9], [7, 1, 9]])
def test_different_tokens_end_the_worker_at_the_next_comparison(
    tokens: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = group(monkeypatch, [7, 2, 9])
    for _ in range(2 * CHECK_STEPS - 1):
        ranks.check_tokens(torch.tensor(tokens))
    with pytest.raises(RuntimeError, match="sampled different tokens"):
        ranks.check_tokens(torch.tensor(tokens))
