"""Roles on different machines of a Ray cluster: equal tokens, whatever is lost or slow."""

import asyncio
import itertools
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from quadriga.client import AsyncClient
from quadriga.errors import DeadlineExceeded
from quadriga.server.processes.page_sources import FILE_NAME, write_sources
from tests.cluster.cluster_server import GREEDY, ClusterServer, cluster_server, raylet_of
from tests.cluster.conftest import MACHINE
from tests.faults.inject import ALL_APART, fault_environment
from tests.integration.equality import lengths_up_to, prompts_of, references, serve_all
from tests.link_proxy import LinkProxy
from tests.server import wait_until

pytestmark = pytest.mark.timeout(300)

NEW_TOKENS = 60
STREAMS = 12
FLAGS = ["--page-size", "4", "--max-restarts", "1000", "--watchdog-timeout", "5"]
# Of the machines of each role, in the order of the replicas.
RESOURCES = ("prompts", "tokens")
ROLES = [*FLAGS, "--dp", "2", "--prefill-replicas", "1", "--chunked-prefill-size", "32"]
ROLES += ["--load-balance-method", "cache-aware"]
ROLES += ["--role-resources", "prefill=prompts,decode=tokens"]
PREFILL, DECODE = 0, 1
RESTART_TIMEOUT_S = 60.0


class Machines:
    """A cluster with a machine for each role, and one without replicas.

    Attributes:
        cluster: the cluster.
    """

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        head = {**MACHINE, "num_cpus": 0, "include_dashboard": False}
        self.cluster = Cluster(initialize_head=True, head_node_args=head)
        self._nodes = [self._add(resource) for resource in RESOURCES]

    def _add(self, resource: str) -> Any:
        return self.cluster.add_node(**MACHINE, resources={resource: 1})

    def remove(self, replica: int) -> None:
        """Let the machine of a replica go as if its power were cut."""
        self.cluster.remove_node(self._nodes[replica], allow_graceful=False)

    def replace(self, replica: int) -> None:
        """Add a machine in place of one that was removed."""
        self._nodes[replica] = self._add(RESOURCES[replica])


@pytest.fixture(scope="module")
def machines() -> Iterator[Machines]:
    pytest.importorskip("ray", reason="ray is not installed: pip install -e '.[ray]'")
    machines = Machines()
    yield machines
    machines.cluster.shutdown()


@pytest.fixture(scope="module")
def server(
    machines: Machines, llama_dir: Path, key_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ClusterServer]:
    log = tmp_path_factory.mktemp("roles") / "log"
    environment = fault_environment(ALL_APART)
    with cluster_server(machines.cluster, llama_dir, key_dir, log, ROLES, environment) as server:
        yield server


class Prompts:
    """Prompts, and the tokens that follow each."""

    def __init__(self, model_dir: Path) -> None:
        model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
        longest = model.config.max_position_embeddings - NEW_TOKENS
        self.prompts = prompts_of(lengths_up_to(longest, 16), 512)
        self.answers = references(model, self.prompts, NEW_TOKENS)


@pytest.fixture(scope="module")
def prompts(llama_dir: Path) -> Prompts:
    return Prompts(llama_dir)


def serve(
    server: ClusterServer, prompts: Prompts, disturb: Callable[[], object] = lambda: None
) -> None:
    """Serve all prompts, disturbed after a moment, and compare their tokens."""

    async def run() -> list[list[int]]:
        work = serve_all(server.endpoint, prompts.prompts, NEW_TOKENS, server.keys)
        answers = asyncio.ensure_future(work)
        await asyncio.sleep(0.1)
        await asyncio.to_thread(disturb)
        return await answers

    assert asyncio.run(run()) == prompts.answers


def facts(server: ClusterServer) -> Mapping[str, Any]:
    """Return the info of a server at rest, whose pages are all given back."""
    wait_until(lambda: server.info()["pages_held"] == 0, 30)
    return server.info()


def pid_of(server: ClusterServer, name: str) -> int:
    return int(server.info()["pids"].get(name, 0))


def serve_until(
    server: ClusterServer, prompts: Prompts, counter: str = "kv_transfer_pages_total"
) -> None:
    """Serve prompts that no replica has cached, again and again, until a counter has grown."""
    before, give_up_at = server.info()[counter], time.monotonic() + RESTART_TIMEOUT_S
    while server.info()[counter] == before:
        assert time.monotonic() < give_up_at, server.info()
        serve(server, prompts)


def forget_cached(server: ClusterServer) -> None:
    """Kill the worker that generates tokens, whose pages are lost with it."""
    kill(server, f"worker_proc/{DECODE}", signal.SIGKILL)
    wait_until(lambda: server.num_serving() == 2, RESTART_TIMEOUT_S)


def kill(server: ClusterServer, name: str, number: int) -> None:
    """Send a signal to a process, and wait until another one has taken its place."""
    before = pid_of(server, name)
    os.kill(before, number)
    wait_for_another(server, name, before)


def wait_for_another(server: ClusterServer, name: str, before: int) -> None:
    """Wait until another process has taken the place of one, which may stop answers for a while."""

    def is_there() -> bool:
        try:
            return pid_of(server, name) not in (0, before)
        except DeadlineExceeded:
            return False

    wait_until(is_there, RESTART_TIMEOUT_S)


def machine_of(server: ClusterServer, replica: int) -> int:
    return raylet_of(psutil.Process(pid_of(server, f"worker_proc/{replica}")))


def test_prompts_are_computed_on_one_machine_and_tokens_on_another(
    server: ClusterServer, prompts: Prompts
) -> None:
    serve(server, prompts)
    info = facts(server)
    assert info["requests_handed_over"] >= len(prompts.prompts) // 2
    assert info["kv_transfer_pages_total"] > 0
    assert info["kv_offload_damaged_pages_total"] == info["requests_moved"] == 0
    assert machine_of(server, PREFILL) != machine_of(server, DECODE)


@contextmanager
def proxied(server: ClusterServer) -> Iterator[LinkProxy]:
    """Lead the pages through a proxy, until the block ends."""
    line = psutil.Process(pid_of(server, f"worker_proc/{DECODE}")).cmdline()
    run_dir = Path(line[line.index("--server-dir") + 1])
    before = (run_dir / FILE_NAME).read_text()
    number, _, address = before.partition("=")
    proxy = LinkProxy(address)
    write_sources(run_dir, f"{number}={proxy.address}")
    yield proxy
    write_sources(run_dir, before)
    proxy.close()


def cut_again_and_again(proxy: LinkProxy) -> None:
    for _ in range(20):
        time.sleep(0.05)
        proxy.cut()


def slow_down(proxy: LinkProxy) -> None:
    proxy.bytes_per_s = 20_000


def stop(proxy: LinkProxy) -> None:
    proxy.is_stopped = True


def damage(proxy: LinkProxy) -> None:
    def change(data: bytes) -> bytes:
        return data[:-1] + bytes([data[-1] ^ 1]) if len(data) > 4000 else data

    proxy.change = change


@pytest.mark.parametrize("disturb", [cut_again_and_again, slow_down, stop, damage])
def test_a_link_that_is_cut_slow_silent_or_damaged_costs_no_token(
    disturb: Callable[[LinkProxy], None], server: ClusterServer, prompts: Prompts
) -> None:
    forget_cached(server)
    with proxied(server) as proxy:
        serve_until(server, prompts)
        assert proxy.num_bytes > 0, "the pages go through the proxy"
        forget_cached(server)
        began_at = time.monotonic()
        serve(server, prompts, lambda: disturb(proxy))
        serve(server, prompts)
        print(f"{disturb.__name__}: {time.monotonic() - began_at:.1f} s")
    forget_cached(server)
    serve_until(server, prompts)
    assert facts(server)["results_dropped"] >= 0


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("program", ["worker_proc", "scheduler_proc", "detok_proc"])
@pytest.mark.parametrize("replica", [PREFILL, DECODE])
def test_a_process_of_either_role_may_die_while_prompts_move(
    replica: int, program: str, number: int, server: ClusterServer, prompts: Prompts
) -> None:
    name = f"{program}/{replica}"
    before = pid_of(server, name)
    serve(server, prompts, lambda: os.kill(before, number))
    wait_for_another(server, name, before)
    serve(server, prompts)


class Streams:
    """Streams of one client.

    Attributes:
        started: set when each has a token.
        arrivals: when a token came, of each.
    """

    def __init__(self, server: ClusterServer) -> None:
        self._server = server
        self.started = asyncio.Event()
        self.arrivals: list[list[float]] = [[] for _ in range(STREAMS)]

    async def run(self) -> list[list[int]]:
        async with AsyncClient(self._server.endpoint, curve_dir=self._server.keys) as client:
            return await asyncio.gather(*(self._run(client, n) for n in range(STREAMS)))

    async def _run(self, client: AsyncClient, number: int) -> list[int]:
        tokens: list[int] = []
        async for chunk in client.stream([3 + number] * (5 + number), GREEDY):
            tokens += chunk.token_ids
            self.arrivals[number].append(time.monotonic())
            if all(self.arrivals):
                self.started.set()
        return tokens

    def longest_silence(self) -> float:
        """Return the longest time between two tokens of a stream."""
        pauses = [
            later - earlier
            for times in self.arrivals
            for earlier, later in itertools.pairwise(times)
        ]
        return max(pauses)


async def run_streams(
    server: ClusterServer, disturb: Callable[[], object]
) -> tuple[list[list[int]], Streams]:
    streams = Streams(server)
    running = asyncio.ensure_future(streams.run())
    await streams.started.wait()
    await asyncio.to_thread(disturb)
    return await running, streams


@pytest.mark.parametrize("replica", [PREFILL, DECODE])
def test_the_machine_of_a_role_may_be_lost_and_another_takes_its_place(
    replica: int, machines: Machines, server: ClusterServer, prompts: Prompts
) -> None:
    undisturbed, _ = asyncio.run(run_streams(server, lambda: None))
    answers, streams = asyncio.run(run_streams(server, lambda: machines.remove(replica)))
    assert answers == undisturbed
    server.wait_for_replicas(1)
    serve(server, prompts)  # the other role does all of the work
    began_at = time.monotonic()
    machines.replace(replica)
    server.wait_for_replicas(2)
    joined_at = time.monotonic()
    forget_cached(server)
    serve_until(server, prompts)
    print(
        f"the machine of replica {replica} lost: longest silence of {STREAMS} streams"
        f" {streams.longest_silence():.2f} s; a new machine serves after"
        f" {joined_at - began_at:.1f} s, and its pages move after"
        f" {time.monotonic() - began_at:.1f} s"
    )


def test_the_roles_are_spread_over_the_machines(
    machines: Machines, llama_dir: Path, key_dir: Path, tmp_path: Path, prompts: Prompts
) -> None:
    big = {**MACHINE, "num_cpus": 2, "resources": {"pair": 1}}
    nodes = [machines.cluster.add_node(**big) for _ in range(2)]
    flags = [*FLAGS, "--dp", "4", "--prefill-replicas", "2"]
    flags += ["--role-resources", "prefill=pair,decode=pair"]
    environment = fault_environment(ALL_APART)
    try:
        with cluster_server(
            machines.cluster, llama_dir, key_dir, tmp_path / "log", flags, environment
        ) as server:
            found = [machine_of(server, replica) for replica in range(4)]
            assert len({*found[:2]}) == len({*found[2:]}) == 2
            for _ in range(2):
                serve(server, prompts)
            assert facts(server)["kv_transfer_pages_total"] > 0
    finally:
        for node in nodes:
            machines.cluster.remove_node(node)


def test_roles_follow_the_load_over_machines(
    machines: Machines, llama_dir: Path, key_dir: Path, tmp_path: Path, prompts: Prompts
) -> None:
    """Each replica but the last computes prompts at times, and goes on with those of others."""
    nodes = [machines.cluster.add_node(**{**MACHINE, "num_cpus": 2}) for _ in range(2)]
    flags = [*FLAGS, "--dp", "3", "--prefill-replicas", "auto"]
    environment = fault_environment(ALL_APART)
    try:
        with cluster_server(
            machines.cluster, llama_dir, key_dir, tmp_path / "log", flags, environment
        ) as server:
            assert len({machine_of(server, replica) for replica in range(3)}) > 1
            for _ in range(3):
                serve(server, prompts)
            info = facts(server)
            assert info["role_changes"] > 1 and info["requests_handed_over"] > 0
            assert info["kv_transfer_pages_total"] > 0
            assert info["kv_offload_damaged_pages_total"] == info["requests_moved"] == 0
    finally:
        for node in nodes:
            machines.cluster.remove_node(node)
