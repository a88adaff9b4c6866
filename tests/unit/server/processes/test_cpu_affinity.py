"""Which cores the worker has for itself."""

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from quadriga.errors import ConfigError
from quadriga.server.config.engine_args import ReplicaPlace, WorkerArgs
from quadriga.server.processes import machine as module
from quadriga.server.processes.machine import (
    CpuPlan,
    Cpus,
    assign_cpus,
    format_cpus,
    parse_cpus,
    plan_cpus,
    plan_on_node,
)

ON_CPU = WorkerArgs(device="cpu")
NO_CPUS: Cpus = frozenset()


def cores_of(count: int, threads: int = 1) -> list[Cpus]:
    """Their CPUs are numbered as Linux does it: first one of each core, then the second."""
    return [frozenset(core + count * n for n in range(threads)) for core in range(count)]


@pytest.mark.parametrize(
    ("count", "threads", "others"),
    [
        (1, 1, ""),
        (2, 2, ""),
        (3, 3, ""),
        (4, 3, "0"),
        (15, 14, "0"),
        (16, 14, "0-1"),
        (64, 60, "0-3"),
    ],
)
def test_the_worker_has_what_the_others_can_do_without(
    count: int, threads: int, others: str
) -> None:
    found = assign_cpus(cores_of(count), math.inf, ON_CPU)
    assert found.threads == threads
    assert format_cpus(found.others) == others
    assert len(found.worker) == (threads if others else 0)
    assert not found.worker & found.others


def test_a_core_is_given_away_with_both_of_its_hardware_threads() -> None:
    assert assign_cpus(cores_of(4, 2), math.inf, ON_CPU) == CpuPlan(
        threads=3, worker=frozenset({1, 2, 3, 5, 6, 7}), others=frozenset({0, 4})
    )


def test_ranks_share_what_one_worker_would_have() -> None:
    found = assign_cpus(cores_of(16), math.inf, WorkerArgs(device="cpu", tp=2))
    assert (found.threads, len(found.worker), len(found.others)) == (7, 14, 2)


def test_a_container_with_less_time_than_cores_has_fewer_threads_and_no_places() -> None:
    assert assign_cpus(cores_of(64), 2.5, ON_CPU) == CpuPlan(threads=2)
    assert assign_cpus(cores_of(64), 0.5, ON_CPU) == CpuPlan(threads=1)
    assert assign_cpus(cores_of(64), 8.0, ON_CPU) == CpuPlan(threads=7)


@pytest.mark.parametrize(
    ("args", "threads"),
    [(WorkerArgs(device="cpu", worker_threads=8), 8), (WorkerArgs(device="cuda"), 7)],
)
def test_places_are_left_open_where_they_are_not_wanted(args: WorkerArgs, threads: int) -> None:
    assert assign_cpus(cores_of(8), math.inf, args) == CpuPlan(threads, NO_CPUS, NO_CPUS)


def test_fewer_threads_leave_more_cores_to_the_others() -> None:
    found = assign_cpus(cores_of(8), math.inf, WorkerArgs(device="cpu", worker_threads=2))
    assert (format_cpus(found.worker), format_cpus(found.others)) == ("6-7", "0-5")


@pytest.mark.parametrize(
    ("name", "text", "quota"),
    [
        ("cpu.max", "max 100000\n", math.inf),
        ("cpu.max", "150000 100000\n", 1.5),
        ("cpu.cfs_quota_us", "-1\n", math.inf),
        ("cpu.cfs_quota_us", "400000\n", 4.0),
        ("nothing", "", math.inf),
    ],
)
def test_the_time_that_a_container_may_have_is_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, text: str, quota: float
) -> None:
    (tmp_path / name).write_text(text)
    (tmp_path / "cpu.cfs_period_us").write_text("100000\n")
    paths = (tmp_path / "cpu.max", tmp_path / "cpu.cfs_quota_us")
    monkeypatch.setattr(module, "QUOTAS", paths)
    assert module._quota() == quota


NODES = {0: cores_of(20)[:8], 1: cores_of(20)[8:16], 2: cores_of(20)[16:]}


@pytest.mark.parametrize(
    ("num_replicas", "flag", "workers", "others"),
    [
        (1, "auto", ["1-7"], "0,8-19"),
        (3, "auto", ["1-7", "9-15", "17-19"], "0,8,16"),
        (4, "auto", ["2-4", "9-15", "17-19", "5-7"], "0-1,8,16"),
        (2, "1", ["10-12", "13-15"], "0-9,16-19"),
    ],
)
def test_a_worker_is_on_one_numa_node_and_replicas_take_nodes_in_turn(
    num_replicas: int, flag: str, workers: list[str], others: str
) -> None:
    args = WorkerArgs(device="cpu", numa_node=flag)
    for number, cpus in enumerate(workers):
        plan = plan_on_node(NODES, args, ReplicaPlace(number, num_replicas))
        assert plan is not None
        assert (format_cpus(plan.worker), format_cpus(plan.others)) == (cpus, others)
        assert plan.worker <= frozenset().union(*NODES[plan.node if plan.node is not None else -1])
        assert plan.threads == len(plan.worker)


def test_a_worker_has_all_numa_nodes_where_one_is_too_small_or_it_is_asked_for() -> None:
    def plan(**flags: Any) -> CpuPlan | None:
        return plan_on_node(NODES, WorkerArgs(device="cpu", **flags))

    assert plan(numa_node="all") is None
    assert plan(worker_threads=8) is None
    assert plan_on_node({0: cores_of(8)}, ON_CPU) is None
    with pytest.raises(ConfigError, match=r"numa_node is 3, .* \[0, 1, 2\]"):
        plan(numa_node="3")
    with pytest.raises(ConfigError, match="numa_node is 'x'"):
        WorkerArgs(numa_node="x").validate()


def test_the_nodes_of_a_machine_are_those_that_the_system_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for node, cpus in ((0, "0-3"), (1, "4-7"), (2, "")):
        (tmp_path / f"node{node}").mkdir()
        (tmp_path / f"node{node}/cpulist").write_text(f"{cpus}\n")
    monkeypatch.setattr(module, "NUMA_NODES", tmp_path)
    monkeypatch.setattr(module, "_cores", lambda allowed: cores_of(8))
    monkeypatch.setattr(module, "_quota", lambda: math.inf)
    plan = plan_cpus(ON_CPU, ReplicaPlace(1, 2))
    assert plan == CpuPlan(3, frozenset({5, 6, 7}), frozenset({0, 4}), 1)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such call")
def test_memory_is_of_the_node_that_is_preferred() -> None:
    program = (
        "from quadriga.server.processes.machine import prefer_memory_of; prefer_memory_of(0)\n"
        "memory = bytearray(1 << 24)\n"
        "policies = open('/proc/self/numa_maps').read()\n"
        "assert 'prefer:0' in policies or 'prefer=' in policies, policies[:300]"
    )
    if not Path("/proc/self/numa_maps").exists():
        pytest.skip("the kernel says nothing about NUMA")
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_lists_of_cpus_are_read_and_shown() -> None:
    assert parse_cpus("0-2,8\n") == [0, 1, 2, 8]
    assert format_cpus(frozenset({8, 0, 1, 2})) == "0-2,8"
    assert format_cpus(NO_CPUS) == ""


def test_this_machine_has_shares() -> None:
    found = plan_cpus(ON_CPU)
    assert found.threads >= 1
    assert bool(found.worker) == bool(found.others)


def test_without_cpu_pinning_the_plan_names_no_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_cores", lambda allowed: cores_of(8))
    monkeypatch.setattr(module, "_quota", lambda: math.inf)
    assert plan_cpus(ON_CPU).worker
    monkeypatch.delattr("os.sched_setaffinity")
    assert plan_cpus(ON_CPU) == CpuPlan(threads=7)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such call")
def test_a_process_keeps_to_its_cpus_with_the_threads_it_starts() -> None:
    program = (
        "import os, threading; from quadriga.server.processes.machine import pin_to\n"
        "mine = frozenset([min(os.sched_getaffinity(0))]); pin_to(mine)\n"
        "found = []; t = threading.Thread(target=lambda: found.append(os.sched_getaffinity(0)))\n"
        "t.start(); t.join(); assert found == [mine], found"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_replicas_have_equal_shares_of_what_one_worker_would_have() -> None:
    plans = [
        assign_cpus(cores_of(16), math.inf, WorkerArgs(device="cpu", tp=2), ReplicaPlace(number, 3))
        for number in range(3)
    ]
    assert {plan.threads for plan in plans} == {2}
    assert [format_cpus(plan.worker) for plan in plans] == ["4-7", "8-11", "12-15"]
    assert {format_cpus(plan.others) for plan in plans} == {"0-3"}


def test_more_replicas_than_cores_have_a_thread_each_and_share_all_cores() -> None:
    assert assign_cpus(cores_of(2), math.inf, ON_CPU, ReplicaPlace(3, 4)) == CpuPlan(threads=1)


def test_ranks_on_several_machines_share_the_cores_with_those_of_their_own_only() -> None:
    place = ReplicaPlace(num_machines=2)
    plan = assign_cpus(cores_of(16), math.inf, WorkerArgs(device="cpu", tp=4), place)
    assert (plan.threads, format_cpus(plan.worker)) == (7, "2-15")
