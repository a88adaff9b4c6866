"""Invalid bytes and clients that do not read get an error, and others are not disturbed."""

import os
import random
import threading
from collections.abc import Iterator
from contextlib import suppress

import msgpack
import psutil
import pytest

from quadriga.client import Client, SamplingParams
from quadriga.wire.client import MAX_FRAME_BYTES
from tests.faults.fuzz import fuzz_decoders, fuzz_public
from tests.faults.latency import attack
from tests.faults.raw_client import RawClient
from tests.server import Server, settle, wait_until

GREEDY = SamplingParams(temperature=0, max_new_tokens=8, ignore_eos=True)


@pytest.fixture(autouse=True)
def alive(server: Server) -> Iterator[None]:
    """Check after each test that the server answers, and is idle without held pages."""
    yield
    with Client(server.endpoint) as client:
        assert len(client.generate("The quick", GREEDY).token_ids) == 8
    settle(server.endpoint)


@pytest.mark.parametrize(
    ("frames", "named"),
    [
        ([b""], "unreadable message"),
        ([os.urandom(500)], "unreadable message"),
        ([b"\xdd\xff\xff\xff\xff"], "truncated"),
        ([b"a", b"b", b"c"], "this one has 3"),
        ([msgpack.packb(["shutdown", 1])], "shutdown"),
        ([msgpack.packb(["generate", 2, "r", "x"])], "version is 2: this server speaks 1"),
        ([msgpack.packb(["generate", 1, "", "x"])], "request_id has 0 characters"),
        ([msgpack.packb(["generate", 1, "r", "x", {"beams": 5}])], "unknown field `beams`"),
        ([msgpack.packb(["generate", 1, "r", "x", {"max_new_tokens": "5"}])], "max_new_tokens"),
    ],
)
def test_an_invalid_request_is_refused_by_name(
    server: Server, frames: list[bytes], named: str
) -> None:
    with RawClient(server.endpoint) as client:
        client.send(*frames)
        tag, _, error = client.receive()
        assert tag == "refused"
        assert named in error[1]


def test_a_30_mb_frame_is_refused_with_size_and_limit(server: Server) -> None:
    with RawClient(server.endpoint) as client:
        client.send(b"\x95" + b"x" * 30_000_000)
        tag, _, error = client.receive()
        assert tag == "refused"
        assert f"30000001 bytes: at most {MAX_FRAME_BYTES}" in error[1]


def test_a_flood_of_random_frames_disturbs_no_stream(server: Server) -> None:
    chosen = random.Random(1)
    with Client(server.endpoint) as client, RawClient(server.endpoint) as hostile:
        expected = client.generate("The quick", GREEDY).token_ids
        for _ in range(20_000):
            hostile.send(chosen.randbytes(chosen.randrange(40)))
        assert client.generate("The quick", GREEDY, timeout=30).token_ids == expected


def test_messages_that_are_wrong_in_some_way_are_refused_and_counted(server: Server) -> None:
    before = settle(server.endpoint)
    for _ in fuzz_public(server.endpoint, 5_000):
        pass
    after = settle(server.endpoint)
    assert after["pids"] == before["pids"]
    assert after["refused"] - before["refused"] > 1_000


def test_a_decoder_returns_a_message_or_an_error_for_any_bytes() -> None:
    fuzz_decoders(2_000)


def test_a_client_that_does_not_read_is_cut_off_alone_and_notified(server: Server) -> None:
    with RawClient(server.endpoint, receive_queue=1) as lazy, Client(server.endpoint) as client:
        ping = msgpack.packb(["ping", 1])
        others = server.log.read_text().count("cut off")

        def is_cut_off() -> bool:
            for _ in range(10_000):
                lazy.send(ping)
            return server.log.read_text().count("cut off") > others

        wait_until(is_cut_off, 60)
        assert len(client.generate("The quick", GREEDY).token_ids) == 8
        while (message := lazy.receive())[0] != "server_gone":
            assert message[0] in ("pong", "probe")
        assert message[1][0] == "slow_reader"


@pytest.mark.parametrize("name", ["a role of 15 MiB", "700,000 turns", "get_info, 10,000 times"])
def test_other_clients_are_answered_while_one_sends_what_costs_most(
    server: Server, name: str
) -> None:
    num_large = 16
    seconds = attack(server.endpoint, name, 10_000 if "times" in name else num_large)
    print(f"{name}: {len(seconds)} pings, the longest {1000 * max(seconds):.0f} ms")
    # Where a message held up the loop from its begin to its end, there would be a ping for each.
    assert len(seconds) > num_large, "pings are answered while a message is worked on"


def test_memory_of_long_messages_is_released(server: Server) -> None:
    tokenizer = psutil.Process(server.pid_of("tokenizer_proc"))
    before = tokenizer.memory_info().rss
    attack(server.endpoint, "a text of 15 MiB")
    settle(server.endpoint)

    def grown() -> float:
        return (tokenizer.memory_info().rss - before) / 2**20

    # The last message may still be on its way between processes.
    wait_until(lambda: grown() < 48, 20, lambda: f"the tokenizer process holds {grown():.0f} MiB")


def test_a_killed_preparing_process_costs_no_request(server: Server) -> None:
    text = "some words " * 40_000  # so long that a new process encodes it
    with Client(server.endpoint) as client:
        ids = client.tokenize(text)
        stop = threading.Event()
        killed: list[int] = []

        def kill_worker() -> None:
            """Kill the first process of a fork server; the grammars' process has forks, too."""
            tokenizer = psutil.Process(server.pid_of("tokenizer_proc"))
            while not stop.is_set() and not killed:
                with suppress(psutil.NoSuchProcess):
                    workers = [
                        child for parent in tokenizer.children() for child in parent.children()
                    ]
                    for worker in workers[:1]:
                        worker.kill()
                        killed.append(worker.pid)

        killer = threading.Thread(target=kill_worker)
        killer.start()
        try:
            assert client.tokenize(text) == ids
        finally:
            stop.set()
            killer.join()
        assert killed, "the text was encoded before a process could be killed"
        assert client.tokenize(text) == ids
