"""Tenants in the scheduler: weighted shares of computed tokens, refunds, and caches apart."""

import itertools
import json
import random
from collections import Counter, deque
from pathlib import Path

import msgspec
import pytest

from quadriga.errors import ConfigError
from quadriga.server.config.engine_args import SchedulerArgs
from quadriga.wire.to_scheduler import Submit
from scheduler_proc.observe.logs import UsageLog
from scheduler_proc.observe.stats import TenantStats
from scheduler_proc.planning.fairness import FairTenants, WeightedTurns, make_queue
from scheduler_proc.planning.policies import FirstComeFirstServed
from scheduler_proc.state.kv_cache import KVCache
from scheduler_proc.state.request import FinishReason, Request
from tests.unit.scheduler.test_policies import make_request
from tests.unit.simulation import World, submit


def jain(shares: list[float]) -> float:
    """Return Jain's index of fairness: 1 for equal shares, 1/n where one has all."""
    return sum(shares) ** 2 / (len(shares) * sum(share**2 for share in shares))


def of(seq: int, tenant: str, prompt: int = 10, new: int = 90, weight: float = 1.0) -> Request:
    request = make_request(seq, prompt, new)
    request.tenant, request.weight = tenant, weight
    return request


def queue_of_tenants() -> FairTenants:
    return FairTenants(FirstComeFirstServed, lambda r: r.tenant, lambda r: r.weight)


def admit(queue: FairTenants) -> Request:
    request = queue.first(1, 1000)[0]
    queue.take(request)
    request.admitted_at = 1.0
    return request


def end(queue: FairTenants, request: Request, num_generated: int, num_cached: int = 0) -> None:
    request.first_token_at = 2.0
    request.cached_tokens = num_cached
    request.tokens.extend([5] * num_generated)
    queue.remove(request)


def test_one_request_does_not_wait_for_a_thousand_of_another_tenant() -> None:
    queue = queue_of_tenants()
    for seq in range(1000):
        queue.push(of(seq, "a"))
    for _ in range(50):
        end(queue, admit(queue), 90)
    queue.push(of(1000, "b"))
    assert "b" in (admit(queue).tenant, admit(queue).tenant)


@pytest.mark.parametrize("slots", [1, 8, 40])
def test_shares_of_computed_tokens_follow_the_weights_whatever_is_asked_for(slots: int) -> None:
    """Tenants ask for 10 to 100 times of what they then generate, and hit the cache unevenly."""
    weights = {"a": 1.0, "b": 2.0, "c": 4.0}
    asked = {"a": 50, "b": 1000, "c": 4000}
    queue, numbers, draw = queue_of_tenants(), itertools.count(), random.Random(1)
    computed: Counter[str] = Counter()
    running: deque[Request] = deque()

    def send(tenant: str) -> None:
        request = of(next(numbers), tenant, draw.randint(5, 50), asked[tenant], weights[tenant])
        queue.push(request)

    for tenant in weights:
        for _ in range(100):
            send(tenant)
    for _ in range(4000):
        if len(running) == slots:
            request = running[draw.randrange(slots)]
            running.remove(request)
            generated, cached = draw.randint(1, 40), draw.randint(0, request.num_prompt - 1)
            end(queue, request, generated, cached)
            computed[request.tenant] += request.num_prompt - cached + generated
            send(request.tenant)
        running.append(admit(queue))
    assert jain([computed[name] / weight for name, weight in weights.items()]) >= 0.995


def test_a_tenant_that_comes_back_gets_its_share_and_no_more() -> None:
    queue, numbers = queue_of_tenants(), itertools.count()
    for _ in range(500):
        queue.push(of(next(numbers), "a"))
    for _ in range(200):
        end(queue, admit(queue), 90)
    for _ in range(500):
        queue.push(of(next(numbers), "b"))
    taken: Counter[str] = Counter()
    for _ in range(100):
        request = admit(queue)
        taken[request.tenant] += 1
        end(queue, request, 90)
    assert abs(taken["a"] - taken["b"]) <= 2


def test_leaving_for_a_moment_gains_nothing() -> None:
    """B has one request at a time, and is away while it runs."""
    queue, numbers = queue_of_tenants(), itertools.count()
    for _ in range(3000):
        queue.push(of(next(numbers), "a"))
    queue.push(of(next(numbers), "b", 100, 900))
    computed: Counter[str] = Counter()
    running: deque[Request] = deque()
    for _ in range(2000):
        if len(running) == 4:
            request = running.popleft()
            generated = 90 if request.tenant == "a" else 900
            end(queue, request, generated)
            computed[request.tenant] += request.num_prompt + generated
            if request.tenant == "b":
                queue.push(of(next(numbers), "b", 100, 900))
        running.append(admit(queue))
    assert computed["b"] <= 1.05 * computed["a"] + 4000


def test_a_request_that_is_never_admitted_costs_nothing_and_a_retracted_one_costs_once() -> None:
    queue = queue_of_tenants()
    aborted = of(0, "a", 10, 10_000)
    queue.push(aborted)
    for seq in range(1, 8):
        queue.push(of(seq, "ab"[seq % 2]))
    queue.remove(aborted)
    first = admit(queue)
    queue.push(first)  # retracted
    assert first in queue.first(2, 100)
    order = [admit(queue).tenant for _ in range(7)]
    assert Counter(order) == {"a": 3, "b": 4, first.tenant: 3 if first.tenant == "a" else 4}
    assert len(queue) == 0


def test_accounts_are_bounded_and_gone_with_the_last_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("scheduler_proc.planning.fairness.MAX_IDLE_ACCOUNTS", 10)
    queue = queue_of_tenants()
    keep = of(10_000, "keep")
    queue.push(keep)
    for seq in range(1000):
        request = of(seq, str(seq))
        queue.push(request)
        queue.take(request)
        request.admitted_at = 1.0
        end(queue, request, 50)
    assert len(queue._accounts) <= 12
    while len(queue):
        end(queue, admit(queue), 1)
    assert not queue._accounts
    assert not queue._turns
    assert not queue._by_settled
    assert not queue._idle


def test_users_share_within_their_tenant() -> None:
    args = SchedulerArgs(fair_tenants=True)
    queue = make_queue(args, lambda _: KVCache(1, 1).tree.root, 4)
    numbers = itertools.count()
    for _ in range(50):
        for user in range(9):
            queue.push(of(next(numbers), f"many/{user}"))
        queue.push(of(next(numbers), "one"))
    taken: Counter[str] = Counter()
    for _ in range(90):
        request = queue.first(1, 100)[0]
        queue.take(request)
        taken[request.tenant] += 1
        request.admitted_at = 1.0
        end(queue, request, 90)  # type: ignore[arg-type]
    assert taken["one"] == 45
    assert {taken[f"many/{user}"] for user in range(9)} == {5}


def test_with_equal_tenants_the_order_is_that_of_arrival() -> None:
    queue = queue_of_tenants()
    for seq in range(20):
        queue.push(of(seq, "abc"[seq % 3]))
    assert [admit(queue).seq for _ in range(20)] == list(range(20))


# --- the whole scheduler in simulated time --------------------------------------------------------


def job(name: str, tenant: str, prompt: list[int], new: int, weight: float = 1.0) -> Submit:
    message = submit(name, prompt, new, ignore_eos=True)
    return msgspec.structs.replace(message, tenant=tenant, weight=weight)


def fair_world(num_running: int = 8, num_pages: int = 400) -> World:
    args = SchedulerArgs(fair_tenants=True, max_running_requests=num_running, max_batch_size=8)
    world = World(args, num_pages)
    world.checked = False
    return world


def test_shares_in_the_scheduler_follow_the_weights_under_overload() -> None:
    world, draw = fair_world(), random.Random(3)
    weights = {"a": 1.0, "b": 2.0, "c": 4.0}
    for number in range(2000):
        for tenant, weight in weights.items():
            prompt = [draw.randrange(3, 90) for _ in range(draw.randint(2, 30))]
            world.schedule([job(f"{tenant}{number}", tenant, prompt, draw.randint(1, 40), weight)])
    for _ in range(4000):
        world.step()
    tokens: Counter[str] = Counter()
    for name, generated in world.detok.tokens.items():
        tokens[name[0]] += len(generated)
    assert world.scheduler.num_queued > 1000
    ended = Counter(name[0] for name in world.detok.closed)
    assert min(ended.values()) > 50
    assert jain([tokens[name] / weight for name, weight in weights.items()]) >= 0.98


def test_requests_that_run_have_rows_by_the_weights_of_their_tenants() -> None:
    """More run than a step has rows, and none waits."""
    world, weights = fair_world(64, 10_000), {"a": 1.0, "b": 2.0, "c": 4.0}
    for number in range(12):
        for tenant, weight in weights.items():
            world.schedule([job(f"{tenant}{number}", tenant, [number + 3], 1000, weight)])
    for _ in range(400):
        world.step()
    assert world.scheduler.num_queued == 0
    tokens: Counter[str] = Counter()
    for name, generated in world.detok.tokens.items():
        tokens[name[0]] += len(generated)
    assert jain([tokens[name] / weight for name, weight in weights.items()]) >= 0.999
    of_a = [len(ids) for name, ids in world.detok.tokens.items() if name[0] == "a"]
    assert max(of_a) - min(of_a) <= 6  # they were not admitted in the same step


def test_rows_that_a_tenant_cannot_use_go_to_others_and_are_not_saved_up() -> None:
    turns = WeightedTurns()
    requests = {0: of(0, "a", weight=100.0)} | {seq: of(seq, "b") for seq in range(1, 9)}
    for _ in range(20):
        rows = turns.next_rows(requests, 4)
        assert requests[0] in rows
        assert len(rows) == 4
    requests |= {seq: of(seq, "a") for seq in range(9, 12)}
    del requests[0]
    names = [request.tenant for _ in range(10) for request in turns.next_rows(requests, 4)]
    assert abs(names.count("a") - names.count("b")) <= 2


def test_with_a_row_for_each_all_have_one() -> None:
    turns = WeightedTurns()
    requests = {seq: of(seq, "ab"[seq % 2]) for seq in range(6)}
    assert turns.next_rows(requests, 6) == list(requests.values())


@pytest.mark.parametrize("has_tenants", [True, False])
def test_the_first_token_of_a_tenant_does_not_wait_for_the_queue_of_another(
    has_tenants: bool,
) -> None:
    world = fair_world()
    for number in range(1000):
        world.schedule([job(f"a{number}", "a" if has_tenants else "", [3, 4, number % 90 + 3], 20)])
    for _ in range(50):
        world.step()
    sent_at = world.worker.now
    world.send(job("b", "b" if has_tenants else "", [7, 7, 7], 20))
    while not world.detok.tokens.get("b"):
        assert world.step()
    seconds = world.worker.now - sent_at
    assert seconds < 0.5 if has_tenants else seconds > 20


def test_a_cache_that_is_apart_serves_only_its_tenant() -> None:
    cache = KVCache(64, 4)

    def computed(seq: int, salt: bytes) -> int:
        request = make_request(seq, 40)
        request.cache_salt = salt
        cache.allocate(request)
        num_cached = request.num_computed_tokens
        request.num_computed_tokens = len(request.tokens)
        cache.release(request)
        cache.check([])
        return num_cached

    assert [computed(1, b""), computed(2, b""), computed(3, b"a"), computed(4, b"b")] == [
        0,
        36,
        0,
        0,
    ]
    assert [computed(5, b"a"), computed(6, b"b"), computed(7, b"")] == [36, 36, 36]


# --- counters and the usage log -------------------------------------------------------------------


def ended(seq: int, tenant: str, generated: int = 5) -> Request:
    request = of(seq, tenant)
    request.tokens.extend([5] * generated)
    request.cached_tokens, request.tokenized_at, request.admitted_at = 4, 100.0, 100.5
    request.finish(FinishReason.STOP)
    return request


def test_the_tenants_with_most_tokens_are_shown_and_the_others_together() -> None:
    stats = TenantStats()
    for number in range(3000):
        stats.on_finish(ended(number, f"t{number}"))
    for number in range(99):
        stats.on_finish(ended(number, f"large{number}/user", 500))
    stats.on_finish(ended(1, ""))
    shown = stats.info()
    assert len(shown) == 101
    assert shown["large7"] == [1, 10, 4, 500, 0.5]
    assert sum(numbers[0] for numbers in shown.values()) == 3099


def test_the_usage_log_has_a_line_for_each_choice(tmp_path: Path) -> None:
    path = tmp_path / "usage.jsonl"
    for seq in range(2):
        log = UsageLog(str(path))
        request = ended(seq, "a/u")
        request.received_at = 99.0
        log.on_finish(request, 101.25)
        log.close()
    first, second = map(json.loads, path.read_text().splitlines())
    assert first == {
        "time": 101.25, "tenant": "a/u", "request": "0", "choice": 0, "tokens_in": 10, "cached": 4,
        "tokens_out": 5, "seconds": 2.25, "finish_reason": "stop",
    }  # fmt: skip
    assert second["request"] == "1"
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_full_disk_ends_the_usage_log_only(caplog: pytest.LogCaptureFixture) -> None:
    log = UsageLog("/dev/full")
    log.on_finish(ended(0, "a"), 101.0)
    log._thread.join(10)
    log.on_finish(ended(1, "a"), 101.0)
    log.close()
    assert [r.message for r in caplog.records] == [
        "the usage log /dev/full ends: No space left on device; restart the server to go on with it"
    ]
    with pytest.raises(ConfigError, match="cannot be written: No such file or directory"):
        UsageLog("/no/such/directory/usage.jsonl")
