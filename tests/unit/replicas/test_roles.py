"""Where a prompt is computed, and where its request goes on, among replicas with roles."""

from collections.abc import Mapping

import pytest

from quadriga.errors import ConfigError
from quadriga.server.config.engine_args import BY_CACHE, LOAD_BALANCE_METHODS
from quadriga.server.config.server_config import ServerConfig
from quadriga.server.prefix_blocks import block_hashes
from quadriga.wire.packing import pack_ids
from quadriga.wire.to_detok import ReplicaNews
from tokenizer_proc.replicas.roles import FREE_TOKENS, HAND_OVER_TOKENS, RoleRouter, Roles
from tokenizer_proc.replicas.router import Prompt

BLOCK, PAGE, MAX_RUNNING = 64, 16, 8
PREFILL, DECODE = (0, 1), (2, 3)
LONG, SHORT = 6000, FREE_TOKENS


def router_of(method: str = BY_CACHE) -> RoleRouter[str]:
    """Return a router of two replicas of each role."""
    return RoleRouter(Roles(len(PREFILL), MAX_RUNNING), method, 4, BLOCK, PAGE, 100)


def prompt(num_tokens: int, first: int = 0, **fields: bool) -> Prompt:
    hashes = block_hashes(pack_ids(range(first, first + num_tokens)), BLOCK)
    return Prompt(num_tokens, hashes, **fields)


def run_streams(router: RoleRouter[str], count: int) -> None:
    """Let each replica that generates tokens have streams."""
    for number in range(count * len(DECODE)):
        replica = DECODE[number % 2]
        router.count(f"stream {number}", replica, Prompt(10, []))
        router.on_start(f"stream {number}", 0)


@pytest.mark.parametrize("method", LOAD_BALANCE_METHODS)
def test_a_long_prompt_is_computed_apart_from_streams(method: str) -> None:
    router = router_of(method)
    run_streams(router, 4)
    chosen = [router.place(f"r{n}", prompt(LONG, 7000 * n)).replica for n in range(4)]
    assert sorted(chosen) == [0, 0, 1, 1]


def test_a_short_prompt_stays_where_tokens_are_generated() -> None:
    router = router_of()
    run_streams(router, 4)
    assert router.choose(prompt(SHORT)).replica in DECODE


def test_a_prompt_that_is_cached_where_tokens_are_generated_stays_there() -> None:
    router = router_of()
    run_streams(router, 4)
    asked = prompt(LONG)
    router.on_news(DECODE[1], ReplicaNews(b"".join(asked.hashes), b"", 1000))
    assert router.choose(asked).replica == DECODE[1]


def test_a_queue_of_prompts_is_helped_by_a_replica_without_streams() -> None:
    router = router_of()
    chosen = [router.place(f"r{n}", prompt(LONG, 7000 * n)).replica for n in range(6)]
    assert set(chosen) == {*PREFILL, *DECODE}


def test_streams_keep_a_prompt_away_until_the_others_have_much_to_do() -> None:
    router = router_of()
    run_streams(router, 4)
    chosen = [router.place(f"r{n}", prompt(LONG, 7000 * n)).replica for n in range(4)]
    assert set(chosen) == set(PREFILL)
    more = [router.place(f"m{n}", prompt(LONG, 70_000 + 7000 * n)).replica for n in range(8)]
    assert set(more) & set(DECODE)


def test_a_request_that_ends_at_once_is_computed_apart() -> None:
    router = router_of()
    assert router.choose(prompt(SHORT, ends_at_once=True)).replica in PREFILL


def test_vectors_are_made_by_all_replicas_where_there_are_many() -> None:
    router = router_of()
    chosen = [
        router.place(f"r{n}", prompt(SHORT, 1000 * n, ends_at_once=True)).replica for n in range(40)
    ]
    assert set(chosen) == {*PREFILL, *DECODE}


def test_a_computed_prompt_goes_on_where_the_load_is_least() -> None:
    router = router_of()
    run_streams(router, 2)
    router.on_end("stream 1", 0)
    found = router.find_next(prompt(LONG), 0)
    assert found is not None
    assert found.replica == DECODE[1]
    assert router.find_next(prompt(LONG), DECODE[0]) is None, "it is there already"


@pytest.mark.parametrize(
    ("available", "streams", "goes_on"),
    [
        (LONG // PAGE + 1, 2, True),
        (LONG // PAGE - 1, 2, False),
        (10_000, MAX_RUNNING, False),
        (0, 0, True),  # an idle replica makes room
    ],
)
def test_a_computed_prompt_stays_until_another_replica_has_a_slot_and_pages(
    available: int, streams: int, goes_on: bool
) -> None:
    router = router_of()
    run_streams(router, streams)
    for replica in DECODE:
        router.on_news(replica, ReplicaNews(num_available=available))
    assert (router.find_next(prompt(LONG), 0) is not None) == goes_on


def test_pages_on_their_way_are_not_given_twice() -> None:
    router = router_of()
    run_streams(router, 1)
    for replica in DECODE:
        router.on_news(replica, ReplicaNews(num_available=LONG // PAGE + 10))
    places = []
    for number in range(3):
        found = router.find_next(prompt(LONG), 0)
        if found is not None:
            places.append(found.replica)
            router.count(f"r{number}", found.replica, prompt(LONG))
    assert sorted(places) == list(DECODE)


def test_a_request_goes_on_where_its_pages_were_loaded_ahead() -> None:
    router, asked = router_of(), prompt(LONG)
    run_streams(router, 2)
    ahead = router.choose_ahead(asked, 0, None)
    assert ahead in DECODE
    assert [router.choose_ahead(asked, 0, ahead) for _ in range(3)] == [ahead] * 3
    router.on_news(ahead, ReplicaNews(b"".join(asked.hashes), b"", 1000))
    for number in range(3):  # it has a little more to do than the other one meanwhile
        router.count(f"r{number}", ahead, Prompt(10, []))
    found = router.find_next(asked, 0)
    assert found is not None
    assert (found.replica, found.num_cached) == (ahead, LONG // BLOCK * BLOCK)


@pytest.mark.parametrize(
    "method", [method for method in LOAD_BALANCE_METHODS if method != BY_CACHE]
)
def test_no_pages_are_loaded_ahead_where_they_draw_no_request(method: str) -> None:
    router = router_of(method)
    assert router.choose_ahead(prompt(LONG), 0, None) is None


def test_pages_are_loaded_ahead_only_for_what_will_go_on_where_there_is_room() -> None:
    router = router_of()
    assert router.choose_ahead(prompt(LONG, ends_at_once=True), 0, None) is None
    assert router.choose_ahead(prompt(LONG), DECODE[0], None) is None
    run_streams(router, 2)
    router.on_news(DECODE[0], ReplicaNews(num_available=10))
    assert router.choose_ahead(prompt(LONG), 0, DECODE[0]) == DECODE[1]
    router.on_news(DECODE[1], ReplicaNews(num_available=10))
    assert router.choose_ahead(prompt(LONG), 0, DECODE[1]) is None


@pytest.mark.parametrize("role", [PREFILL, DECODE])
def test_replicas_of_one_role_do_all_where_the_others_are_gone(role: tuple[int, ...]) -> None:
    router = router_of()
    for replica in role:
        router.set_up(replica, False)
    left = PREFILL if role == DECODE else DECODE
    kinds: list[Mapping[str, bool]] = [{}, {"goes_on": True}]
    for fields in kinds:
        assert router.choose(prompt(LONG, **fields)).replica in left
    assert router.find_next(prompt(LONG), 0) is None or role == PREFILL


def test_a_request_that_has_tokens_goes_on_where_these_are_generated() -> None:
    router = router_of()
    assert router.choose(prompt(LONG, goes_on=True)).replica in DECODE
    assert HAND_OVER_TOKENS < LONG


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"prefill_replicas": 1}, "start with --dp 2"),
        ({"dp": 2, "prefill_replicas": 2}, "start with --dp 3"),
        ({"dp": 2, "prefill_replicas": -1}, "must be 0 or more"),
        (
            {"dp": 2, "prefill_replicas": 1, "cluster": "ray", "max_replicas": 3},
            "leave --max-replicas out",
        ),
        ({"dp": 2, "prefill_replicas": 1, "role_resources": "prefill=a"}, "--cluster ray only"),
        ({"dp": 2, "cluster": "ray", "role_resources": "prefill=a"}, "--prefill-replicas only"),
        (
            {"dp": 2, "prefill_replicas": 1, "cluster": "ray", "role_resources": "draft=a"},
            "a role of prefill or decode",
        ),
        (
            {"dp": 2, "prefill_replicas": 1, "disable_radix_cache": True,
             "load_balance_method": "least-loaded"},
            "--disable-radix-cache",
        ),
        ({"dp": 2, "prefill_replicas": 1, "tp": 2}, "--tp 2"),
        ({"prefill_replicas": "auto"}, "start with --dp 2 or more"),
        (
            {"dp": 2, "prefill_replicas": "auto", "cluster": "ray", "role_resources": "decode=a"},
            "leave --role-resources out",
        ),
    ],
)  # fmt: skip
def test_roles_that_cannot_work_are_refused(flags: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        ServerConfig().replace(**flags).validate()
