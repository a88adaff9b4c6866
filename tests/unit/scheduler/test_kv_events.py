"""Events of the prefix cache: their hashes, the tree behind them, the log, and the publisher."""

import hashlib
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quadriga.errors import AddressInUse, ConfigError
from quadriga.server.config.kv_events import KVEventsConfig, parse_kv_events
from quadriga.wire.kv_events import AllBlocksCleared, BlockStored, Event, KVEventBatch
from scheduler_proc.kv_events import publisher
from scheduler_proc.kv_events.publisher import BatchLog, KVEvents
from scheduler_proc.kv_events.tree_events import TreeEvents, block_hash, root_hash
from scheduler_proc.state.kv_cache import KVCache
from scheduler_proc.state.request import Request
from scheduler_proc.state.window import make_kv_cache
from tests.kv_event_subscriber import KVEventSubscriber
from tests.unit.scheduler.requests import request_of_tokens
from tests.waiting import wait_until

PAGE = 16
ROOT = bytes.fromhex("4e1195df020de59e0d65a33a4279f1183e7ae4e5d980e309f8b55adff2e61c3e")
ADAPTERS = {"id-1": "french", "id-2": "german", "id-3": "french"}


# --- hashes ---------------------------------------------------------------------------------------


def test_hashes_are_those_of_sha256_over_canonical_cbor(monkeypatch: pytest.MonkeyPatch) -> None:
    """The values are of the package cbor2."""
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    assert root_hash() == ROOT
    first = block_hash(ROOT, range(16), None)
    second = block_hash(first, [65536 + n for n in range(16)], ("french",))
    salted = block_hash(ROOT, [255, 256, 65535, 2**31 - 1] * 4, ("french", "salt"))
    assert [found.hex() for found in (first, second, salted)] == [
        "d830de3d42c00f25a2949b5d12d98642664a44872c1614c5b0147556276afc9c",
        "fb285426be930e9db4ff2532bb786c07c70b8750f3ec0ce36befb5d319fe9b70",
        "7aeeb38ad27b53d9e9b4a5d95a932eabdd22f2e6c31ba00fd9203843a6f8071c",
    ]


@settings(max_examples=300, deadline=None)
@given(
    token_ids=st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=300),
    extra_keys=st.none() | st.tuples(st.text(max_size=300)) | st.tuples(st.text(), st.text()),
)
def test_hashes_are_those_of_cbor2(token_ids: list[int], extra_keys: Any) -> None:
    cbor2 = pytest.importorskip("cbor2")
    encoded = cbor2.dumps((ROOT, tuple(token_ids), extra_keys), canonical=True)
    assert block_hash(ROOT, token_ids, extra_keys) == hashlib.sha256(encoded).digest()


def test_the_root_follows_the_hash_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    assert root_hash() == ROOT
    monkeypatch.setenv("PYTHONHASHSEED", "42")
    assert root_hash() == hashlib.sha256(b"\x6242").digest()


# --- the tree -------------------------------------------------------------------------------------


class Index:
    """The blocks that a reader of the events knows."""

    def __init__(self) -> None:
        self.blocks: set[bytes] = set()

    def take_in(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, AllBlocksCleared):
                self.blocks.clear()
            elif isinstance(event, BlockStored):
                assert self.blocks.isdisjoint(event.block_hashes)
                self.blocks |= set(event.block_hashes)
            else:
                assert self.blocks >= set(event.block_hashes)
                self.blocks -= set(event.block_hashes)


def tree_events() -> TreeEvents:
    return TreeEvents(ROOT, ADAPTERS.get)


def expected_hashes(tokens: list[int], salt: str = "") -> list[bytes]:
    """Return the hashes of a prompt's whole blocks, as a router computes them."""
    adapter, _, rest = (
        salt.partition("\0") if salt.partition("\0")[0] in ADAPTERS else ("", "", salt)
    )
    names = (ADAPTERS[adapter],) if adapter else ()
    hashes, parent = [], ROOT
    for start in range(0, len(tokens) - PAGE + 1, PAGE):
        own = (rest.removeprefix("\0"),) if start == 0 and rest else ()
        parent = block_hash(parent, tokens[start : start + PAGE], (*names, *own) or None)
        hashes.append(parent)
    return hashes


def blocks_of(kv: KVCache) -> set[bytes]:
    """Return the hashes of what requests can match, by the keys of the tree alone."""
    found = set()
    for node in kv.tree.nodes():
        path = node.path()
        if node.page < 0 or not all(above.is_shared for above in path):
            continue
        size = PAGE * 4
        salt = path[0].key[:-size].decode()
        tokens = request_of_tokens([]).tokens
        for above in path:
            tokens.frombytes(above.key[-size:])
        found.add(expected_hashes(tokens.tolist(), salt)[-1])
    return found


def begin(kv: KVCache, tokens: list[int], salt: str = "", num_computed: int = 1 << 30) -> Request:
    """Let a request have pages, and compute all of its tokens or some of them."""
    request = request_of_tokens(tokens)
    request.cache_salt = salt.encode()
    kv.allocate(request)
    num_computed = max(num_computed, request.num_computed_tokens)
    request.num_computed_tokens = min(num_computed, request.num_known_tokens)
    kv.cache_computed(request)
    return request


def tokens_of(group: int, num_tokens: int) -> list[int]:
    return [1000 * group + n % 7 for n in range(num_tokens)]


def test_a_prompt_is_one_event_with_the_hashes_that_a_router_computes() -> None:
    kv, events = KVCache(64, PAGE), tree_events()
    events.watch(kv)
    assert events.take() == [AllBlocksCleared()]
    tokens = tokens_of(1, 3 * PAGE + 5)
    kv.release(begin(kv, tokens))
    hashes = expected_hashes(tokens)
    stored = BlockStored(hashes, None, tokens[: 3 * PAGE], PAGE, None, "GPU", None)
    assert events.take() == [stored]
    longer = [*tokens[: 2 * PAGE], *tokens_of(2, PAGE + 1)]
    kv.release(begin(kv, longer))
    (branch,) = events.take()
    assert isinstance(branch, BlockStored)
    assert branch.parent_block_hash == hashes[1]
    assert branch.block_hashes == expected_hashes(longer)[2:]
    assert events.take() == []
    kv.flush()
    assert events.take() == [AllBlocksCleared()]


@pytest.mark.parametrize(
    ("salt", "keys", "adapter"),
    [
        ("", None, None),
        ("\0mine", ("mine",), None),
        ("alice", ("alice",), None),
        ("alice\0mine", ("alice\0mine",), None),
        ("id-1\0", ("french",), "french"),
        ("id-2\0\0mine", ("german", "mine"), "german"),
        ("id-1\0alice", ("french", "alice"), "french"),
    ],
)
def test_adapters_and_salts_are_extra_keys(
    salt: str, keys: tuple[str, ...] | None, adapter: str | None
) -> None:
    kv, events = KVCache(64, PAGE), tree_events()
    events.watch(kv)
    events.take()
    tokens = tokens_of(1, 2 * PAGE + 1)
    kv.release(begin(kv, tokens, salt))
    (stored,) = events.take()
    assert isinstance(stored, BlockStored)
    assert stored.lora_name == adapter and stored.lora_id == (None if adapter is None else 1)
    later = None if adapter is None else (adapter,)
    assert stored.extra_keys == (None if keys is None else [keys, later])
    assert stored.block_hashes[0] == block_hash(ROOT, tokens[:PAGE], keys)
    assert stored.block_hashes[1] == block_hash(
        stored.block_hashes[0], tokens[PAGE : 2 * PAGE], later
    )


def test_a_block_of_a_replaced_adapter_is_removed_with_the_last_of_its_name() -> None:
    kv, events, index = KVCache(64, PAGE), tree_events(), Index()
    events.watch(kv)
    held = begin(kv, tokens_of(1, PAGE + 1), "id-3\0")
    kv.release(begin(kv, tokens_of(1, PAGE + 1), "id-1\0"))
    index.take_in(events.take())
    assert len(index.blocks) == 1
    kv.flush()
    index.take_in(events.take())
    assert len(index.blocks) == 1
    kv.release(held)
    kv.flush()
    index.take_in(events.take())
    assert index.blocks == set()


def test_what_lies_below_a_withdrawn_page_is_not_announced() -> None:
    kv, events, index = KVCache(64, PAGE), tree_events(), Index()
    events.watch(kv)
    tokens = tokens_of(1, 4 * PAGE + 1)
    first = begin(kv, tokens[: 2 * PAGE + 1])
    second = begin(kv, tokens, "", 2 * PAGE)
    kv.withdraw(first, PAGE)
    second.num_computed_tokens = len(tokens)
    kv.release(second)
    index.take_in(events.take())
    assert index.blocks == {expected_hashes(tokens)[0]} == blocks_of(kv)


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["run", "run", "run", "begin", "end", "withdraw", "flush", "take", "new"]),
        st.integers(0, 4),
        st.integers(1, 5 * PAGE),
        st.sampled_from(["", "", "\0salt", "id-1\0", "id-3\0"]),
    ),
    max_size=40,
)


@pytest.mark.parametrize("window", [0, 2 * PAGE])
@settings(max_examples=200, deadline=None)
@given(steps=STEPS, restates=st.booleans())
def test_the_events_together_say_what_requests_can_match(
    window: int, steps: list[tuple[str, int, int, str]], restates: bool
) -> None:
    kv = make_kv_cache(24, PAGE, window, 0, prefix_cache=True)
    events, index, held = tree_events(), Index(), list[Request]()
    events.watch(kv)
    for name, group, num_tokens, salt in steps:
        if name in ("run", "begin"):
            if kv.pages_needed(salted(group, num_tokens, salt)) > kv.num_available:
                continue
            if name == "run":
                kv.release(begin(kv, tokens_of(group, num_tokens), salt))
            else:
                held.append(begin(kv, tokens_of(group, num_tokens), salt, num_tokens // 2))
        elif name == "end" and held:
            request = held.pop(group % len(held))
            request.num_computed_tokens = request.num_known_tokens
            kv.release(request)
        elif name == "withdraw" and held:
            request = held[group % len(held)]
            kv.withdraw(request, min(num_tokens, len(request.pages) * PAGE - 1))
        elif name == "flush":
            kv.flush()
        elif name == "new":
            kv, held = make_kv_cache(24, PAGE, window, 0, prefix_cache=True), []
            events.watch(kv)
        else:
            index.take_in(events.take())
    index.take_in(events.take())
    assert index.blocks == blocks_of(kv)
    if restates:
        index.blocks = {b"something else"}
        events.restate()
        index.take_in(events.take())
        assert index.blocks == blocks_of(kv)


def salted(group: int, num_tokens: int, salt: str) -> Request:
    request = request_of_tokens(tokens_of(group, num_tokens))
    request.cache_salt = salt.encode()
    return request


# --- the log --------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_bytes", [1 << 20, 2000])
def test_a_replay_from_any_number_leads_to_the_present_state(max_bytes: int) -> None:
    rng = random.Random(0)
    log, events, index = BatchLog(5, max_bytes), tree_events(), Index()
    kv = KVCache(24, PAGE)
    events.watch(kv)
    states: dict[int, set[bytes]] = {99: set()}
    for sequence in range(100, 160):
        kv.release(begin(kv, tokens_of(rng.randrange(9), rng.randrange(1, 6 * PAGE))))
        if sequence == 130:
            kv.flush()
        batch = events.take()
        log.append(sequence, msgspec.msgpack.encode(KVEventBatch(1.0, batch, 3)))
        index.take_in(batch)
        states[sequence] = set(index.blocks)
    for since in (0, 99, 120, 154, 155, 159, 160):
        reader = Index()
        reader.blocks = set(states[max(since - 1, 99)])
        numbers = []
        for number, payload in log.since(since):
            batch_ = msgspec.msgpack.decode(payload, type=KVEventBatch)
            assert batch_.data_parallel_rank == 3
            reader.take_in(batch_.events)
            assert reader.blocks == states[number]
            numbers.append(number)
        assert reader.blocks == index.blocks
        assert len(numbers) <= 6
        assert numbers == list(range(numbers[0], 160)) if numbers else since == 160


# --- the publisher --------------------------------------------------------------------------------


class World:
    """A pool whose events are published, and a subscriber."""

    def __init__(self, directory: Path, **fields: Any) -> None:
        self.config = KVEventsConfig(
            enable_kv_cache_events=True,
            endpoint=f"ipc://{directory}/events",
            replay_endpoint=f"ipc://{directory}/replay",
            **fields,
        )
        self.now = 1_800_000_000.0
        self.events = self.start()
        assert self.config.replay_endpoint is not None
        self.subscriber = KVEventSubscriber(
            self.config.endpoint, self.config.replay_endpoint, self.config.topic
        )
        self.kv = KVCache(64, PAGE)

    def start(self) -> KVEvents:
        self.now += 1
        return KVEvents(self.config, 2, lambda: self.now, ADAPTERS.get)

    def run(self, group: int, num_tokens: int) -> None:
        self.kv.release(begin(self.kv, tokens_of(group, num_tokens)))
        self.events.publish()

    def is_followed(self) -> bool:
        while self.subscriber.receive(0.02):
            pass
        return self.subscriber.blocks.keys() == blocks_of(self.kv)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path, topic="kv@pod", buffer_steps=20)
    yield made
    made.subscriber.close()
    made.events.close()


def test_a_subscriber_follows_the_tree_through_losses_and_new_schedulers(world: World) -> None:
    rng = random.Random(1)
    world.events.watch(world.kv)
    world.subscriber.lose_every = 3

    def follows() -> bool:
        world.run(rng.randrange(20), rng.randrange(1, 9 * PAGE))
        return world.is_followed()

    for number in range(200):
        world.run(rng.randrange(20), rng.randrange(1, 9 * PAGE))
        if number % 5 == 0:
            world.subscriber.receive(0.0)
        if number in (70, 140):
            world.events.close()
            world.events, world.kv = world.start(), KVCache(64, PAGE)
            world.events.watch(world.kv)
            num_cleared = world.subscriber.num_cleared
            wait_until(follows, 20)  # its socket connects again some time after the restart
            assert world.subscriber.num_cleared > num_cleared
    world.subscriber.lose_every = 0
    wait_until(follows, 20)
    assert world.subscriber.num_cleared >= 2
    assert world.subscriber.num_replayed > 0


def test_a_late_subscriber_asks_for_a_replay_and_knows_the_whole_tree(world: World) -> None:
    world.events.watch(world.kv)
    for number in range(60):  # more than the log has
        world.run(number % 10, (number % 6 + 1) * PAGE + 1)
    wait_until(lambda: replayed(world), 10)


def replayed(world: World) -> bool:
    world.subscriber.replay()
    return world.subscriber.blocks.keys() == blocks_of(world.kv)


def test_a_thread_that_lags_behind_costs_a_subscriber_nothing_but_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on = threading.Event()
    run = publisher._Publisher.run

    def delayed(thread: publisher._Publisher) -> None:
        goes_on.wait(20)
        run(thread)

    monkeypatch.setattr(publisher._Publisher, "run", delayed)
    world = World(tmp_path, max_queue_size=2)
    world.events.watch(world.kv)
    for number in range(30):
        world.run(number, 2 * PAGE + 1)
    assert world.events._is_behind
    goes_on.set()

    def follows() -> bool:
        world.run(40, 3 * PAGE + 1)
        world.kv.flush()
        world.run(41, 3 * PAGE + 1)
        return world.is_followed()

    wait_until(follows, 20)
    world.subscriber.close()
    world.events.close()


def test_an_address_in_use_is_named(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/missing/events"
    config = KVEventsConfig(enable_kv_cache_events=True, endpoint=endpoint)
    with pytest.raises(AddressInUse, match="missing/events cannot be bound"):
        KVEvents(config, 0, lambda: 0.0, ADAPTERS.get)


# --- the flag -------------------------------------------------------------------------------------


def test_the_json_has_the_fields_and_defaults_of_vllm() -> None:
    assert not parse_kv_events("").is_on
    assert not parse_kv_events('{"enable_kv_cache_events": false}').is_on
    assert not parse_kv_events('{"enable_kv_cache_events": true, "publisher": "null"}').is_on
    config = parse_kv_events(
        '{"enable_kv_cache_events": true, "publisher": "zmq", "topic": "kv@pod@model",'
        ' "replay_endpoint": "tcp://*:5657", "buffer_steps": 5, "hwm": 6, "max_queue_size": 7}'
    )
    assert config.is_on and config.endpoint == "tcp://*:5557"
    assert (config.buffer_steps, config.hwm, config.max_queue_size) == (5, 6, 7)
    second = config.of_replica(1)
    assert (second.endpoint, second.replay_endpoint) == ("tcp://*:5558", "tcp://*:5658")
    assert KVEventsConfig(endpoint="ipc:///run/kv").of_replica(1).endpoint == "ipc:///run/kv_dp1"


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("{", "must be JSON such as"),
        ('{"endpont": "tcp://*:1"}', "endpont"),
        ('{"buffer_steps": 0}', "buffer_steps"),
        ('{"publisher": "kafka"}', "kafka"),
        ('{"endpoint": "*:5557"}', "tcp://HOST:PORT"),
        ('{"endpoint": "tcp://*:x"}', "tcp://HOST:PORT"),
        ('{"replay_endpoint": "tcp://*:70000"}', "replay_endpoint"),
        ('{"replay_endpoint": "tcp://*:5557"}', "give each its own"),
    ],
)
def test_what_cannot_work_is_refused(text: str, named: str) -> None:
    with pytest.raises(ConfigError, match="kv_events_config") as refused:
        parse_kv_events(text)
    assert named in str(refused.value)
