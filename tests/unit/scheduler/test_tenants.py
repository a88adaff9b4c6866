"""Tenants in the scheduler: weighted shares under load, rows by weight, and caches apart."""

import errno
import json
import os
import random
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import msgspec
import pytest

from quadriga.errors import ConfigError
from quadriga.server.config.engine_args import SchedulerArgs
from quadriga.wire.to_scheduler import Submit
from scheduler_proc.observe import logs
from scheduler_proc.observe.logs import UsageLog
from scheduler_proc.observe.stats import TenantStats
from scheduler_proc.planning.fairness import WeightedTurns, tenant_share
from scheduler_proc.state.kv_cache import KVCache
from scheduler_proc.state.request import FinishReason, Request
from tests.unit.scheduler.requests import jain, waiting_request
from tests.unit.simulation import World, submit
from tests.waiting import wait_until


def of(seq: int, tenant: str, prompt: int = 10, new: int = 90, weight: float = 1.0) -> Request:
    request = waiting_request(seq, prompt, new)
    request.tenant, request.weight = tenant, weight
    return request


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
    turns = WeightedTurns(tenant_share)
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
    turns = WeightedTurns(tenant_share)
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
        request = waiting_request(seq, 40)
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


def test_lines_wait_for_a_full_disk_and_the_stop_does_not(caplog: pytest.LogCaptureFixture) -> None:
    log = UsageLog("/dev/full")
    log.on_finish(ended(0, "a"), 101.0)
    wait_until(lambda: bool(caplog.records), 10)
    log.on_finish(ended(1, "a"), 101.0)
    log.close()
    assert [r.message for r in caplog.records][:2] == [
        "the usage log /dev/full cannot be written: No space left on device; lines wait for room,"
        " 100000 at most",
        "the usage log /dev/full ends without 1 lines",
    ]
    with pytest.raises(ConfigError, match="cannot be written: No such file or directory"):
        UsageLog("/no/such/directory/usage.jsonl")


def has_lines(path: Path, count: int) -> bool:
    return path.read_bytes().count(b"\n") == count


FULL = "full"


def on_a_full_disk(
    monkeypatch: pytest.MonkeyPatch,
    steps: Sequence[int | str | None],
    before_error: Callable[[], object] = lambda: None,
) -> None:
    """Let writes end as the steps say: after so many bytes, with an error (FULL), or whole."""
    write, left = os.write, iter(steps)

    def limited(file: int, data: bytes) -> int:
        step = next(left, None)
        if isinstance(step, str):
            before_error()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(file, data[:step])

    monkeypatch.setattr(logs, "USAGE_RETRY_S", 0.01)
    monkeypatch.setattr(os, "write", limited)


def test_lines_that_waited_for_the_disk_are_written_once_it_has_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "usage.jsonl"
    on_a_full_disk(monkeypatch, [3, None, FULL, None])
    log = UsageLog(str(path))
    for seq in range(5):
        log.on_finish(ended(seq, "a"), 101.0)
        wait_until(partial(has_lines, path, seq + 1), 10)
    log.close()
    lines = [json.loads(line)["request"] for line in path.read_text().splitlines()]
    assert lines == ["0", "1", "2", "3", "4"]
    assert "is written again" in caplog.text


def test_lines_go_into_a_new_file_once_the_log_was_renamed(tmp_path: Path) -> None:
    path = tmp_path / "usage.jsonl"
    log = UsageLog(str(path))
    for seq in range(4):
        log.on_finish(ended(seq, "a"), 101.0)
        wait_until(lambda: path.exists() and path.stat().st_size > 0, 10)
        path.rename(tmp_path / f"usage.jsonl.{seq}")
    log.close()
    for seq in range(4):
        (line,) = (tmp_path / f"usage.jsonl.{seq}").read_text().splitlines()
        assert json.loads(line)["request"] == str(seq)


def test_a_line_that_was_cut_by_a_full_disk_is_whole_in_the_new_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "usage.jsonl"
    on_a_full_disk(monkeypatch, [4, FULL], lambda: path.rename(tmp_path / "full"))
    log = UsageLog(str(path))
    log.on_finish(ended(7, "a"), 101.0)
    wait_until(lambda: path.exists() and path.read_bytes().endswith(b"\n"), 10)
    log.close()
    assert json.loads(path.read_text())["request"] == "7"
    assert (tmp_path / "full").stat().st_size == 4


def test_where_no_new_file_can_be_made_lines_go_on_into_the_renamed_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "logs" / "usage.jsonl"
    path.parent.mkdir()
    log = UsageLog(str(path))
    path.parent.rename(tmp_path / "moved")
    for seq in range(3):
        log.on_finish(ended(seq, "a"), 101.0)
    log.close()
    assert (tmp_path / "moved" / "usage.jsonl").read_text().count("\n") == 3
    assert [r.message.split("; ")[1] for r in caplog.records] == [
        "lines go on into the renamed file"
    ]
