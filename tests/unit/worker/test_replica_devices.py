"""Which GPU, CPUs and how much memory a worker gets, of one replica among several, too."""

import logging
import os
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from quadriga.errors import ConfigError
from quadriga.server.config.engine_args import ReplicaPlace, WorkerArgs
from tests.unit.worker_driver import CPU, SHAPE
from worker_proc.startup import devices
from worker_proc.startup.devices import (
    check_devices,
    choose_device,
    choose_dtype,
    take_cores,
    use_gpu,
)
from worker_proc.startup.memory_profile import num_pool_pages

GPU = torch.device("cuda", 0)


def has_gpus(
    monkeypatch: pytest.MonkeyPatch, count: int, capability: tuple[int, int] = (8, 0)
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)


def test_each_rank_of_each_replica_has_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    has_gpus(monkeypatch, 5)
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
    has_gpus(monkeypatch, 2)
    assert [choose_device("cuda", rank % 2, 2, place).index for rank in range(4)] == [0, 1, 0, 1]


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("cuda", "cuda.*start with --device cpu"),
        ("gpu", "must be auto, cpu, cuda"),
        ("meta", "must be auto, cpu, cuda"),
    ],
)
def test_a_device_that_is_not_there_is_refused(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        choose_device(name)


def test_the_dtype_of_a_cpu_is_what_its_kernels_multiply() -> None:
    assert choose_dtype("auto", CPU, native=True) == torch.bfloat16
    assert choose_dtype("float32", CPU, native=True) == torch.float32
    with pytest.raises(ConfigError, match=r"float16.*use --dtype bfloat16 or float32"):
        choose_dtype("float16", CPU)


def test_the_thread_flag_wins_over_the_number_of_cores() -> None:
    before = torch.get_num_threads()
    try:
        args = WorkerArgs(worker_threads=1)
        assert take_cores(args).threads == torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


def test_a_gpu_without_bfloat16_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    has_gpus(monkeypatch, 1)
    assert choose_dtype("auto", choose_device("auto")) == torch.bfloat16
    has_gpus(monkeypatch, 1, (7, 5))
    with pytest.raises(ConfigError, match=r"cuda:0 has compute capability 7\.5.*--device cpu"):
        choose_device("auto")


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
@pytest.mark.parametrize(
    ("cuda", "why"), [(None, "is built without CUDA"), ("13.0", r"\(CUDA 13\.0\)")]
)
def test_a_gpu_that_torch_cannot_use_is_said_where_the_cpu_computes_instead(
    cuda: str | None,
    why: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    monkeypatch.setattr(devices, "GPU_DEVICE", tmp_path / "none")
    assert choose_device("auto") == CPU and not caplog.messages
    monkeypatch.setattr(devices, "GPU_DEVICE", tmp_path)
    with caplog.at_level(logging.WARNING):
        assert choose_device("auto") == CPU
    (line,) = caplog.messages
    assert line.startswith("an NVIDIA GPU is here, but torch")
    assert re.search(why, line) and "the CPU computes instead" in line
    assert choose_device("cpu") == CPU and len(caplog.messages) == 1


def test_products_are_added_up_exactly_and_a_process_runs_beside_its_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pinned: list[frozenset[int]] = []
    matmul = torch.backends.cuda.matmul
    gpu = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x3B, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    monkeypatch.setattr(devices, "PCI_DEVICES", tmp_path)
    monkeypatch.setattr(devices, "NUMA_NODES", tmp_path)
    monkeypatch.setattr(devices, "pin_to", pinned.append)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3}, raising=False)
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cpus: None, raising=False)
    matmul.allow_bf16_reduced_precision_reduction = True
    matmul.allow_fp16_reduced_precision_reduction = True
    (tmp_path / "node1").mkdir()
    (tmp_path / "node1/cpulist").write_text("2-5\n")
    (tmp_path / "0000:3b:00.0").mkdir()
    use_gpu(GPU)
    for node in ("-1", "1"):
        (tmp_path / "0000:3b:00.0/numa_node").write_text(f"{node}\n")
        use_gpu(GPU)
    assert pinned == [frozenset(), frozenset(), frozenset({2, 3})]
    assert not matmul.allow_bf16_reduced_precision_reduction
    assert not matmul.allow_fp16_reduced_precision_reduction
