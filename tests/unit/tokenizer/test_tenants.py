"""The frontend's part of tenants: who a request belongs to, and its quotas."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from quadriga.errors import InvalidRequest, QuotaExceeded
from quadriga.sampling.params import SamplingParams
from quadriga.server.config.engine_args import ModelArgs
from quadriga.server.config.frontend_args import TenantArgs
from quadriga.server.tenants import Tenant
from quadriga.wire.client import Info, ProgressAnswer, Refused, gateway_address
from quadriga.wire.sockets import encode
from quadriga.wire.to_scheduler import AbortRequest, Submit
from tests.unit.tokenizer.frontend_world import FrontendWorld
from tokenizer_proc.intake.tenants import WINDOW_S, Quotas, RequestOwners

GATEWAY = gateway_address().bytes
TINY = ModelArgs(served_model_name="tiny")
FILE = """
- {name: alice, curve: al, weight: 3, max_open_requests: 2, priority: [-10, -1], cache: own}
- {name: bob, curve: bo, models: [other], sub_tenants: true}
- {name: carol, curve: ca, tokens_per_minute: 10}
"""


@pytest.fixture
def args(tmp_path: Path) -> TenantArgs:
    path = tmp_path / "keys.yaml"
    path.write_text(FILE)
    return TenantArgs(keys=str(path))


def world_of(args: TenantArgs, **keywords: Any) -> FrontendWorld:
    return FrontendWorld(max_queued=1000, owners=RequestOwners(args, TINY, **keywords))


def submitted(world: FrontendWorld) -> list[Submit]:
    return [message for message in world.scheduler.sent if isinstance(message, Submit)]


def refusal(world: FrontendWorld) -> str:
    refused = world.port.last()
    assert isinstance(refused, Refused)
    return refused.error.message


async def test_only_a_gateway_names_the_tenant_of_its_requests() -> None:
    world = world_of(TenantArgs(tenants_by="address"))
    world.ask("1", GATEWAY, tenant="10.0.0.1")
    world.ask("1", b"a" * 16, tenant="10.0.0.1")
    world.ask("1", b"b" * 16)
    names = [message.tenant for message in submitted(world)]
    assert names[0] == "10.0.0.1"
    assert all(name.startswith("client-") for name in names[1:]) and names[1] != names[2]


def test_an_address_like_a_gateways_needs_the_servers_key(args: TenantArgs) -> None:
    names = {GATEWAY: "al", b"x": "bo", b"y": "unknown"}
    owners = RequestOwners(args, TINY, names)
    assert owners.owner(GATEWAY, "bob").name == "alice"
    assert owners.owner(b"x", "alice").name == "bob"
    assert owners.owner(b"y", "alice").name.startswith("client-")
    names[GATEWAY] = ""
    assert owners.owner(GATEWAY, "bob").name == "bob"
    owners.forget(b"x")
    assert b"x" not in names


def test_a_client_of_its_own_sees_what_is_served_and_its_own_usage(args: TenantArgs) -> None:
    usage = {"alice": [1, 2, 3, 4, 0.5], "bob": [5, 6, 7, 8, 0.5]}
    values = {"context_length": 100, "waiting": 3, "generation_tokens_total": 12, "tenants": usage}
    answer = encode(Info("q", values))
    owners = RequestOwners(args, TINY, {b"x": "bo", GATEWAY: ""})
    assert owners.visible(GATEWAY, answer) == answer
    shown = msgspec.msgpack.decode(owners.visible(b"x", answer), type=Info)
    assert shown == Info("q", {"context_length": 100, "tenants": {"bob": usage["bob"]}})
    other = encode(ProgressAnswer("q", []))
    assert owners.visible(b"x", other) == other
    assert RequestOwners(TenantArgs(), TINY).visible(b"x", answer) == answer


@pytest.fixture
def owners(args: TenantArgs) -> RequestOwners:
    return RequestOwners(args, TINY)


async def test_weight_priority_and_salt_go_with_a_request(args: TenantArgs) -> None:
    world = world_of(args)
    world.ask("1", GATEWAY, tenant="alice")
    world.ask("2", GATEWAY, tenant="alice", priority=-7)
    world.ask("3", GATEWAY)
    own, chosen, none = submitted(world)
    assert (own.tenant, own.weight, own.cache_salt, own.priority) == ("alice", 3, "alice", -1)
    assert chosen.priority == -7
    assert (none.tenant, none.weight, none.cache_salt, none.priority) == ("", 1, "", 0)
    world.ask("4", GATEWAY, tenant="alice", priority=5)
    assert "tenant alice may use -10 to -1" in refusal(world)
    world.ask("5", GATEWAY, tenant="bob/u")
    assert "model is 'tiny', and tenant bob may use other" in refusal(world)
    world.ask("6", GATEWAY, tenant="dora")
    assert "there is no tenant 'dora' any more" in refusal(world)


async def test_open_requests_are_counted_until_their_ends_or_the_loss_of_their_client(
    args: TenantArgs,
) -> None:
    world = world_of(args)
    for name in ("1", "2", "3"):
        world.ask(name, GATEWAY, tenant="alice")
    assert len(submitted(world)) == 2
    assert "has 2 open requests and its max_open_requests is 2" in refusal(world)
    world.deliver(GATEWAY, ended=("1",))
    world.ask("4", GATEWAY, tenant="alice")
    assert len(submitted(world)) == 3
    world.lose(GATEWAY)
    world.ask("5", GATEWAY, tenant="alice")
    world.ask("6", GATEWAY, tenant="alice")
    world.ask("7", GATEWAY, tenant="alice")
    assert len(submitted(world)) == 5


async def test_a_request_that_is_sent_again_is_counted_once(args: TenantArgs) -> None:
    world = world_of(args)
    for _ in range(3):
        world.ask("1", GATEWAY, tenant="alice", resent=True)
    world.ask("2", GATEWAY, tenant="alice")
    assert {message.request_id for message in submitted(world)} == {"1", "2"}


async def test_generated_tokens_count_when_a_request_ends(args: TenantArgs) -> None:
    world = world_of(args)
    world.ask("1", GATEWAY, tenant="carol")
    world.deliver(GATEWAY, ended=("1",), generated=(9,))
    world.ask("2", GATEWAY, tenant="carol")
    assert "has used 10 tokens in the last 60 s and its tokens_per_minute" in refusal(world)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.1

    def __call__(self) -> float:
        return self.now


def retry_after(quotas: Quotas, tenant: Tenant, num_prompt_tokens: int) -> float | None:
    """Return the hint of a refusal; None where the request would be accepted."""
    try:
        quotas.check(tenant, num_prompt_tokens)
    except QuotaExceeded as error:
        return error.retry_after
    return None


def test_requests_a_minute_are_exact_to_one_request_and_so_is_the_hint() -> None:
    clock = Clock()
    quotas, tenant = Quotas(clock), Tenant(name="a", requests_per_minute=7)
    accepted: list[float] = []
    for _ in range(4000):
        clock.now += 0.7713
        hint = retry_after(quotas, tenant, 1)
        if hint is not None:
            expected = accepted[-7] + WINDOW_S - clock.now
            assert expected - 1e-6 <= hint <= expected + 0.0011
            clock.now += hint
        quotas.check(tenant, 1)
        quotas.count_accepted(tenant, 1)
        accepted.append(clock.now)
    waits = [later - first for first, later in zip(accepted, accepted[7:], strict=False)]
    assert min(waits) >= WINDOW_S - 1e-6
    assert max(waits) <= WINDOW_S + 0.8


def test_tokens_a_minute_wait_for_as_many_as_the_prompt_needs() -> None:
    clock = Clock()
    quotas, tenant = Quotas(clock), Tenant(name="a", tokens_per_minute=100)
    for _ in range(10):
        quotas.check(tenant, 10)
        quotas.count_accepted(tenant, 10)
        clock.now += 1
    hint = retry_after(quotas, tenant, 25)
    assert hint is not None
    assert 51.99 < hint < 52.01
    clock.now += hint
    quotas.check(tenant, 25)
    with pytest.raises(InvalidRequest, match="tokens_per_minute of tenant a is 100; shorten it"):
        quotas.check(tenant, 101)


PER_MINUTE = """
- {name: dan, curve: da, requests_per_minute: 2, max_open_requests: 9}
- {name: eve, curve: ev, tokens_per_minute: 100}
"""


@pytest.fixture
def per_minute(tmp_path: Path) -> TenantArgs:
    path = tmp_path / "per-minute.yaml"
    path.write_text(PER_MINUTE)
    return TenantArgs(keys=str(path))


def ids_of(world: FrontendWorld) -> list[str]:
    return [message.request_id for message in submitted(world)]


async def test_a_connection_that_is_lost_again_and_again_brings_no_further_requests(
    per_minute: TenantArgs,
) -> None:
    world = world_of(per_minute)
    for name in ("a", "b"):
        world.ask(name, GATEWAY, tenant="dan")
    for turn in range(5):
        world.lose(GATEWAY)
        for name in ("a", "b"):
            params = SamplingParams(seed=turn + 1)
            world.ask(name, GATEWAY, tenant="dan", params=params, resent=turn % 2 == 0)
    assert ids_of(world) == ["a", "b"]
    assert "has used 2 requests in the last 60 s" in refusal(world)


async def test_a_request_that_comes_back_after_a_lost_connection_counts_once_and_answers_the_same(
    per_minute: TenantArgs,
) -> None:
    world = world_of(per_minute)
    world.ask("a", GATEWAY, tenant="dan")
    world.lose(GATEWAY)
    world.ask("a", GATEWAY, tenant="dan", resent=True)
    world.ask("b", GATEWAY, tenant="dan")
    assert ids_of(world) == ["a", "a", "b"]
    first, again, _ = submitted(world)
    assert first.params.seed == again.params.seed
    for _ in range(4):  # more of them count
        world.lose(GATEWAY)
        world.ask("a", GATEWAY, tenant="dan", resent=True)
    assert ids_of(world) == ["a", "a", "b", "a", "a"]


async def test_the_end_of_a_request_may_be_asked_for_again_and_an_aborted_one_is_a_new_one(
    per_minute: TenantArgs,
) -> None:
    world = world_of(per_minute)
    world.ask("a", GATEWAY, tenant="dan")
    world.deliver(GATEWAY, ended=("a",))
    world.ask("a", GATEWAY, tenant="dan", resent=True)
    world.ask("b", GATEWAY, tenant="dan")
    assert ids_of(world) == ["a", "a", "b"]
    world.frontend.intake.abort(GATEWAY, "b")
    world.ask("b", GATEWAY, tenant="dan", resent=True)
    assert "has used 2 requests" in refusal(world)


@pytest.mark.parametrize("resent", [True, False])
async def test_after_a_death_of_the_frontend_only_what_the_scheduler_knows_is_free(
    per_minute: TenantArgs, resent: bool
) -> None:
    world = FrontendWorld(max_queued=1000, replaces=True, owners=RequestOwners(per_minute, TINY))
    for name in ("known", "x1", "x2", "x3"):
        world.ask(name, GATEWAY, tenant="dan", resent=resent)
    if resent:
        assert ids_of(world) == []
        world.restate([(GATEWAY, "known")])
        assert ids_of(world) == ["known", "x1", "x2"]
    else:
        assert ids_of(world) == ["known", "x1"]
        world.restate()
    assert "has used 2 requests" in refusal(world)
    world.ask("late", GATEWAY, tenant="dan", resent=True)
    assert "late" not in ids_of(world)


async def test_a_request_that_waits_for_the_scheduler_may_be_aborted_or_lost(
    per_minute: TenantArgs,
) -> None:
    world = FrontendWorld(max_queued=1000, replaces=True, owners=RequestOwners(per_minute, TINY))
    world.ask("a", GATEWAY, tenant="dan", resent=True)
    world.frontend.intake.abort(GATEWAY, "a")
    world.ask("b", b"gone", resent=True)
    world.restate([(GATEWAY, "a")])
    aborted = [m for m in world.scheduler.sent if isinstance(m, AbortRequest)]
    assert ids_of(world) == ["a", "b"]
    assert aborted[-1].request_id == "a"
    world.lose(GATEWAY)
    assert world.frontend.intake.num_open == 1


async def test_tokens_that_a_lost_connection_cut_off_count_and_repeated_ends_do_not(
    per_minute: TenantArgs,
) -> None:
    world = world_of(per_minute)
    world.ask("a", GATEWAY, tenant="eve")
    world.lose(GATEWAY)
    world.deliver(GATEWAY, ended=("a",), generated=(60,), lost=True)
    world.ask("a", GATEWAY, tenant="eve", resent=True)
    for _ in range(2):
        world.deliver(GATEWAY, ended=("a",), generated=(30,))
        world.ask("a", GATEWAY, tenant="eve", resent=True)
    world.ask("b", GATEWAY, tenant="eve")
    assert ids_of(world)[-1] == "b"  # 1 + 60 + 30 + 1 of 100
    params = SamplingParams(max_new_tokens=4)
    for number in range(9):
        world.ask(f"c{number}", GATEWAY, tenant="eve", params=params)
    assert "has used 100 tokens" in refusal(world)
