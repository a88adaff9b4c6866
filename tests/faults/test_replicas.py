"""Processes of one of two replicas are killed under load, and no answer differs."""

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from quadriga.client import AsyncClient, Client, Completion
from quadriga.server.tracing.context import started, traceparent_of
from quadriga.wire.live import LiveStep
from tests.everything import more
from tests.faults.streams import STREAMS, run_streams, run_streams_with_a_kill, same
from tests.server import Server, running_server, settle, wait_until

FLAGS = ["--dtype", "float32", "--worker-threads", "1", "--max-total-tokens", "8192"]
LOAD_FLAGS = ["--watchdog-timeout", "20", "--load-balance-method", "least-loaded"]


@pytest.fixture(scope="module")
def undisturbed(server: Server) -> list[Completion]:
    """Return the answers of a server of one replica."""
    return asyncio.run(run_streams(server.endpoint, asyncio.Event()))


@pytest.fixture(scope="module")
def replicas(llama_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    flags = ["--model", str(llama_dir), *FLAGS, *LOAD_FLAGS, "--dp", "2", "--max-restarts", "100"]
    with running_server(tmp_path_factory.mktemp("replicas") / "log", *flags) as server:
        yield server


def test_two_replicas_share_the_streams_and_answer_as_one_does(
    replicas: Server, undisturbed: list[Completion]
) -> None:
    assert same(asyncio.run(run_streams(replicas.endpoint, asyncio.Event())), undisturbed)
    info = settle(replicas.endpoint)
    assert [one["replica"] for one in info["replicas"]] == [0, 1]
    ended = [sum(one["ended"].values()) for one in info["replicas"]]
    assert min(ended) >= STREAMS // 4
    assert sum(ended) == sum(info["ended"].values())
    assert {"scheduler_proc/0", "worker_proc/1", "tokenizer_proc"} <= info["pids"].keys()


@pytest.mark.parametrize(
    "name", ["worker_proc/1", "detok_proc/0", "tokenizer_proc", "scheduler_proc/1"]
)
def test_streams_are_the_same_when_a_process_of_one_replica_dies(
    replicas: Server, undisturbed: list[Completion], name: str
) -> None:
    before = replicas.pid_of(name)
    answers = asyncio.run(run_streams_with_a_kill(replicas, name, signal.SIGKILL))
    assert same(answers, undisturbed)
    wait_until(lambda: replicas.pid_of(name) not in (0, before), 30)
    assert f"{name} died (killed by SIGKILL)" in replicas.log.read_text()
    assert settle(replicas.endpoint, 60)["pages_held"] == 0


def test_all_processes_of_a_replica_may_die_at_once(
    replicas: Server, undisturbed: list[Completion]
) -> None:
    async def run() -> list[Completion]:
        started = asyncio.Event()
        task = asyncio.create_task(run_streams(replicas.endpoint, started))
        await started.wait()
        for name in ("worker_proc/0", "scheduler_proc/0", "detok_proc/0"):
            os.kill(replicas.pid_of(name), signal.SIGKILL)
        return await task

    assert same(asyncio.run(run()), undisturbed)
    settle(replicas.endpoint, 60)


@pytest.mark.parametrize("name", ["worker_proc/0", "scheduler_proc/1", more("detok_proc/1")])
def test_the_requests_of_a_lost_replica_go_on_at_the_other(
    llama_dir: Path, tmp_path: Path, undisturbed: list[Completion], name: str
) -> None:
    flags = ["--model", str(llama_dir), *FLAGS, *LOAD_FLAGS, "--dp", "2", "--max-restarts", "0"]
    with running_server(tmp_path / "log", *flags) as server:
        number = int(name[-1])
        assert same(asyncio.run(run_streams_with_a_kill(server, name, signal.SIGKILL)), undisturbed)
        info = settle(server.endpoint)
        assert [one["replica"] for one in info["replicas"]] == [1 - number]
        assert info["requests_moved"] > 0
        assert info["open_requests"] == 0
        assert f"replica {number} is lost" in server.log.read_text()
        assert same(asyncio.run(run_streams(server.endpoint, asyncio.Event())), undisturbed)


def test_a_frontend_that_is_restarted_after_a_loss_knows_of_it(
    llama_dir: Path, tmp_path: Path, undisturbed: list[Completion]
) -> None:
    flags = ["--model", str(llama_dir), *FLAGS, *LOAD_FLAGS, "--dp", "2", "--max-restarts", "1"]
    with running_server(tmp_path / "log", *flags) as server:
        pid = server.pid_of("detok_proc/0")
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: server.pid_of("detok_proc/0") not in (0, pid), 30)
        os.kill(server.pid_of("detok_proc/0"), signal.SIGKILL)
        wait_until(lambda: "replica 0 is lost" in server.log.read_text(), 30)
        assert same(
            asyncio.run(run_streams_with_a_kill(server, "tokenizer_proc", signal.SIGKILL)),
            undisturbed,
        )


def test_a_reload_moves_the_requests_of_each_replica_to_the_other(
    replicas: Server, undisturbed: list[Completion]
) -> None:
    before = [replicas.pid_of(f"worker_proc/{number}") for number in range(2)]
    num_moved = settle(replicas.endpoint)["requests_moved"]

    async def run() -> list[Completion]:
        started = asyncio.Event()
        task = asyncio.create_task(run_streams(replicas.endpoint, started))
        await started.wait()
        replicas.process.send_signal(signal.SIGHUP)
        return await task

    assert same(asyncio.run(run()), undisturbed)

    def both_are_new() -> bool:
        now = [replicas.pid_of(f"worker_proc/{number}") for number in range(2)]
        return 0 not in now and not set(now) & set(before)

    def both_serve() -> bool:
        return [one["replica"] for one in settle(replicas.endpoint, 60)["replicas"]] == [0, 1]

    wait_until(both_are_new, 60)
    wait_until(both_serve, 60)
    assert settle(replicas.endpoint)["requests_moved"] >= num_moved + STREAMS // 4


def test_requests_of_both_replicas_can_be_aborted(replicas: Server) -> None:
    async def run() -> None:
        async with AsyncClient(replicas.endpoint) as client:
            streams = [client.stream([5 + n] * 20) for n in range(8)]
            for stream in streams:
                await anext(aiter(stream))

    asyncio.run(run())
    assert settle(replicas.endpoint)["running"] == 0
    with Client(replicas.endpoint) as client:
        assert client.info()["open_requests"] == 0


def test_each_replica_can_be_watched_and_its_requests_have_traces(replicas: Server) -> None:
    seen: list[set[str]] = [set(), set()]
    arrived = [asyncio.Event(), asyncio.Event()]

    async def watch(client: AsyncClient, replica: int) -> None:
        async for message in client.watch(replica):
            if isinstance(message, LiveStep):
                assert message.replica == replica
                seen[replica] |= {request.request_id for request in message.requests}
                arrived[replica].set()

    async def run() -> None:
        async with AsyncClient(replicas.endpoint) as client:
            watching = [asyncio.create_task(watch(client, replica)) for replica in (0, 1)]
            await asyncio.gather(*(event.wait() for event in arrived))
            parent = traceparent_of(started(sampled=True))
            prompts = [[5 + number] * 20 for number in range(8)]
            answers = await asyncio.gather(
                *(client.generate(prompt, traceparent=parent) for prompt in prompts)
            )
            for task in watching:
                task.cancel()
            names = {answer.request_id for answer in answers}
            assert names <= seen[0] | seen[1]
            assert seen[0] & names and seen[1] & names
            assert {trace.request_id for trace in await client.traces(list(names))} == names

    asyncio.run(asyncio.wait_for(run(), 60))
