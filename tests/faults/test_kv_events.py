"""A subscriber of KV events follows a server whose processes are killed, and loses messages."""

import json
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from quadriga.client import Client, SamplingParams
from scheduler_proc.kv_events.tree_events import block_hash, root_hash
from tests.kv_event_subscriber import KVEventSubscriber
from tests.server import Server, running_server, settle, wait_until

PAGE = 16
POOL_TOKENS = 2048
SHORT = SamplingParams(temperature=0, max_new_tokens=20, ignore_eos=True)
FLAGS = ["--dtype", "float32", "--worker-threads", "1", "--max-total-tokens", str(POOL_TOKENS)]


@contextmanager
def following(subscriber: KVEventSubscriber) -> Iterator[None]:
    """Let a thread receive what is published."""
    stops = threading.Event()

    def follow() -> None:
        while not stops.is_set():
            subscriber.receive(0.1)

    thread = threading.Thread(target=follow)
    thread.start()
    try:
        yield
    finally:
        stops.set()
        thread.join()


def prompts(rng: random.Random, count: int) -> list[list[int]]:
    """Return prompts of which several have a beginning in common."""
    bases = [[rng.randrange(3, 90) for _ in range(160)] for _ in range(6)]
    return [
        rng.choice(bases)[: rng.randrange(1, 160)] + [rng.randrange(3, 90) for _ in range(40)]
        for _ in range(count)
    ]


def run(server: Server, rng: random.Random, salt: str = "", count: int = 24) -> None:
    with Client(server.endpoint, reconnect_timeout=60) as client:
        client.generate(prompts(rng, count), SHORT, cache_salt=salt)


def hashes_of(token_ids: list[int], salt: str) -> list[bytes]:
    parent, hashes = root_hash(), list[bytes]()
    for start in range(0, len(token_ids) - PAGE + 1, PAGE):
        keys = (salt,) if salt and start == 0 else None
        parent = block_hash(parent, token_ids[start : start + PAGE], keys)
        hashes.append(parent)
    return hashes


@pytest.mark.parametrize("victim", ["worker_proc", "scheduler_proc"])
def test_the_index_of_a_subscriber_is_the_tree_after_deaths_and_losses(
    llama_dir: Path, tmp_path: Path, victim: str
) -> None:
    config = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"ipc://{tmp_path}/events",
        "replay_endpoint": f"ipc://{tmp_path}/replay",
        "buffer_steps": 20,
        "topic": "kv@pod@model",
    }
    flags = ["--model", str(llama_dir), *FLAGS, "--kv-events-config", json.dumps(config)]
    rng = random.Random(0)
    with running_server(tmp_path / "log", *flags) as server:
        subscriber = KVEventSubscriber(
            str(config["endpoint"]), str(config["replay_endpoint"]), str(config["topic"])
        )
        subscriber.lose_every = 4
        with following(subscriber), ThreadPoolExecutor(1) as pool:
            for name in ("", victim, ""):
                before = server.pid_of(name) if name else 0
                load = pool.submit(run, server, rng, "mine" if name else "")
                if name:
                    wait_until(lambda: subscriber.blocks, 30)
                    os.kill(before, signal.SIGKILL)
                load.result(120)
                if name:
                    wait_until(lambda: server.pid_of(name) not in (0, before), 30)  # noqa: B023
            subscriber.lose_every = 0
            run(server, rng, "", 6)
            run(server, rng, "mine", 6)

            def num_followed() -> int:
                """Return the number of blocks, once all are known.

                A subscriber that was not connected to the new scheduler sees the gap with the next
                message only.
                """
                run(server, rng, "", 1)
                num_cached = int(settle(server.endpoint)["pages_cached"])
                for _ in range(20):  # the messages may come after the answer
                    if len(subscriber.blocks) == num_cached:
                        return num_cached
                    time.sleep(0.05)
                return 0

            num_cached = wait_until(num_followed, 20)
        assert num_cached > POOL_TOKENS // PAGE // 2
        assert subscriber.num_cleared >= 2 and subscriber.num_replayed > 0
        check_tokens(server, subscriber)
        with Client(server.endpoint) as client:
            client.flush_cache()
        wait_until(lambda: subscriber.receive(0.1) and not subscriber.blocks, 20)
        subscriber.close()


def check_tokens(server: Server, subscriber: KVEventSubscriber) -> None:
    """Compare the server's cache with the index, prompt by prompt."""
    parents = {block["parent"] for block in subscriber.blocks.values()}
    ends = [found for found in subscriber.blocks if found not in parents]
    assert len(ends) > 10
    first = {None: 0, "mine": 0}
    for end in ends[-24:]:
        token_ids, block = list[int](), subscriber.blocks[end]
        while True:
            token_ids = block["token_ids"] + token_ids
            if block["parent"] is None:
                break
            block = subscriber.blocks[block["parent"]]
        salt = (block["extra_keys"] or [None])[0]
        first[salt] += 1
        assert hashes_of(token_ids, salt or "")[-1] == end
        with Client(server.endpoint) as client:
            one = SamplingParams(temperature=0, max_new_tokens=1)
            (answer,) = client.generate([[*token_ids, 5]], one, cache_salt=salt or "")
        assert answer.usage.cached_tokens == len(token_ids)
    assert all(first.values())
