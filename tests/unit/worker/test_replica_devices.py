"""Which GPU and how much memory the worker of one replica among several gets."""

import pytest
import torch

from quadriga.errors import ConfigError
from quadriga.server.config.engine_args import ReplicaPlace, WorkerArgs
from tests.unit.worker_driver import CPU, SHAPE
from worker_proc.startup.devices import check_devices, choose_device
from worker_proc.startup.memory_profile import num_pool_pages


def test_each_rank_of_each_replica_has_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 5)
    found = [
        choose_device("cuda:1", rank, 2, ReplicaPlace(number, 2)).index
        for number in range(2)
        for rank in range(2)
    ]
    assert found == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("num_present", "first", "tp", "dp", "words"),
    [
        (4, 0, 2, 3, "--dp 3 with --tp 2 needs 6 GPUs, and 4 are there: start with --dp 2"),
        (4, 2, 1, 3, "needs 3 GPUs, and 2 are there: start with --dp 2"),
        (1, 0, 2, 2, "needs 4 GPUs, and 1 are there: start with --device cpu"),
    ],
)
def test_too_few_gpus_are_an_error_with_what_would_fit(
    num_present: int, first: int, tp: int, dp: int, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        check_devices(num_present, first, tp, dp)


def test_replicas_on_a_cpu_share_the_memory_for_their_pools(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("worker_proc.startup.memory_profile.free_memory", lambda _: 2**30)
    args = WorkerArgs(page_size=16)
    one, two = (
        num_pool_pages(args, SHAPE, torch.float32, CPU, 10**9, num_replicas=count)
        for count in (1, 2)
    )
    assert one // 2 - 1 <= two <= one // 2 + 1


def test_ranks_on_further_machines_count_the_gpus_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    place = ReplicaPlace(num_machines=2)
    assert place.ranks_per_machine(4) == 2
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [choose_device("cuda", rank % 2, 2, place).index for rank in range(4)] == [0, 1, 0, 1]
