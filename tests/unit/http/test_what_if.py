"""POST /v1/what_if: the answered requests in the simulator, bounds, wrong flags, and keys."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from http_proc.core import observe
from http_proc.core.gateway import Gateway
from http_proc.core.observe import RecentChoices
from http_proc.page.what_if import SimulationProcess, config_as_it_was, simulator_flags, with_flags
from quadriga.errors import ConfigError
from quadriga.server.config.server_config import ServerConfig
from tests.unit.http.calls import key_file, send
from tests.unit.http.measured_ring import INFO, NUM_TOKENS, MeasuredRing, completion
from tests.unit.scripted_ring import gateway_before


async def answer(gateway: Gateway, count: int) -> None:
    """Have so many requests answered."""
    for _ in range(count):
        assert (await send(gateway, "/v1/completions", {"prompt": "a"})).status == 200


async def call(gateway: Gateway, body: Any = None, **headers: str) -> tuple[int, Any]:
    """Return status and body of a POST; without a body, of a GET."""
    answer = await send(gateway, "/v1/what_if", body, **headers)
    return answer.status, answer.body


async def test_the_last_requests_are_simulated_with_the_servers_flags_and_with_others() -> None:
    async with gateway_before(MeasuredRing()) as (_, gateway):
        await answer(gateway, 4)
        status, load = await call(gateway)
        assert (status, load["num_choices"]) == (200, 4)
        assert 1 <= load["most_running"] <= 4
        values = {flag["name"]: flag["value"] for flag in load["flags"]}
        assert (values["max_total_tokens"], values["chunked_prefill_size"]) == (64 * 16, 128)
        variants = [{"name": "two", "flags": {"max-running-requests": 1, "dp": 2}}]
        status, found = await call(gateway, {"variants": variants, "last_s": 60})
        assert status == 200, found
        names = [column["name"] for column in found["columns"]]
        assert names == ["measured", "as it was", "two"]
        assert found["num_requests"] == 4
        measured, as_it_was, two = found["columns"]
        assert measured["queue_wait"]["p50"] == pytest.approx(1000, abs=1)
        assert measured["tpot"]["p50"] == pytest.approx(10, abs=0.1)
        for column in (as_it_was, two):
            assert column["failed"] == {}
            assert len(column["waiting"]) == len(column["running"]) == len(measured["waiting"])


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"last_s": 0}, "last_s is 0.0: give 1 to 86400"),
        ({"last_s": "x"}, "last_s"),
        ({"variants": [{"name": ""}]}, "variants[0].name has 0 characters"),
        ({"variants": [{"name": "a"}, {"name": "a"}]}, "two variants are called 'a'"),
        ({"variants": [{"name": str(place)} for place in range(7)]}, "at most 6"),
        ({"variants": [{"name": "a", "flags": {"model": "x"}}]}, "'model' is no flag that can be"),
        ({"variants": [{"name": "a", "flags": {"dp": "x"}}]}, "dp: Expected `int`, got `str`"),
        ({"variants": [{"name": "a", "flags": {"dp": 65}}]}, "at most 64"),
        ({"variants": [{"name": "a", "flags": {"dp": 0}}]}, "dp must be positive"),
        ({"variants": [{"name": "a", "flags": {"batch_mode": "x"}}]}, "it must be one of"),
        ({"variants": [{"name": "a", "flags": {"schedule_policy": "lpm",
                                               "disable_radix_cache": True}}]}, "prefix cache"),
    ],
)  # fmt: skip
async def test_a_wrong_request_is_an_error_that_says_what_may_be_asked(
    body: Any, reason: str
) -> None:
    async with gateway_before(MeasuredRing()) as (_, gateway):
        await answer(gateway, 1)
        status, found = await call(gateway, body)
        assert status == 400
        assert reason in found["error"]["message"]


async def test_without_an_answered_request_there_is_nothing_to_simulate() -> None:
    async with gateway_before(MeasuredRing()) as (_, gateway):
        assert (await call(gateway))[1]["num_choices"] == 0
        status, found = await call(gateway, {})
        assert (status, found["error"]["code"]) == (409, "nothing_recorded")


async def test_a_server_whose_worker_starts_says_so() -> None:
    ring = MeasuredRing()
    async with gateway_before(ring) as (_, gateway):
        del ring.facts["pages_total"]
        status, found = await call(gateway)
        assert status == 503
        assert "/readyz" in found["error"]["message"]


async def test_one_simulation_runs_at_a_time_and_ends_with_the_client_that_wants_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("http_proc.page.what_if.command_of", lambda _: ["sleep", "60"])

    made: list[SimulationProcess] = []
    begin = SimulationProcess.__init__

    def note(self: SimulationProcess) -> None:
        begin(self)
        made.append(self)

    monkeypatch.setattr(SimulationProcess, "__init__", note)
    async with gateway_before(MeasuredRing()) as (_, gateway):
        await answer(gateway, 1)
        first = asyncio.create_task(call(gateway, {}))
        while not made or made[0]._process is None:
            await asyncio.sleep(0)
        process = made[0]._process
        status, found = await call(gateway, {})
        assert (status, found["error"]["code"]) == (429, "simulation_running")
        first.cancel()
        await process.wait()
        assert made[0]._process is None


async def test_a_simulation_that_takes_too_long_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("http_proc.page.what_if.command_of", lambda _: ["sleep", "60"])
    monkeypatch.setattr("http_proc.page.what_if.TIMEOUT_S", 0.05)
    async with gateway_before(MeasuredRing()) as (_, gateway):
        await answer(gateway, 1)
        status, found = await call(gateway, {})
        assert (status, found["error"]["code"]) == (504, "simulation_too_long")


async def test_a_tenants_key_may_not_see_the_load_of_all(tmp_path: Path) -> None:
    file = key_file(tmp_path, alice="hers")
    async with gateway_before(MeasuredRing(), api_key="operator", keys=str(file)) as (_, gateway):
        for key, wanted in (("hers", 403), ("operator", 200)):
            headers = {"Authorization": f"Bearer {key}"}
            assert (await call(gateway, **headers))[0] == wanted
            assert (await call(gateway, {}, **headers))[0] == (wanted if wanted == 403 else 409)
        assert (await call(gateway))[0] == 401


def test_a_cost_model_that_is_not_there_is_an_error_at_the_start() -> None:
    with pytest.raises(ConfigError, match="there is no such file"):
        ServerConfig().replace(what_if_cost_model="/none.json").validate()


async def test_a_cost_model_that_cannot_be_read_is_an_error_of_the_request(tmp_path: Path) -> None:
    file = tmp_path / "model.json"
    file.write_text("{}")
    async with gateway_before(MeasuredRing(), what_if_cost_model=str(file)) as (_, gateway):
        await answer(gateway, 1)
        status, found = await call(gateway, {})
        assert status == 400
        assert str(file) in found["error"]["message"]


def test_the_load_is_bounded_and_has_the_last_arrivals(monkeypatch: pytest.MonkeyPatch) -> None:
    choices = RecentChoices()
    for at in (30.0, 10.0, 20.0):
        choices.add(completion(at), 0, "")
    assert [choice.received_at for choice in choices.since(0)] == [10, 20, 30]
    assert [choice.received_at for choice in choices.since(15)] == [20, 30]
    monkeypatch.setattr(observe, "MAX_RECENT_TOKENS", 2 * NUM_TOKENS)
    assert [choice.received_at for choice in choices.since(0)] == [20, 30]
    choices.add(completion(40.0, 100), 0, "")
    assert [choice.received_at for choice in choices.since(0)] == [40]
    for _ in range(2 * observe.MAX_RECENT_CHOICES):
        choices.add(completion(50.0, 1), 0, "")
    assert len(choices._choices) == observe.MAX_RECENT_CHOICES


def test_the_simulated_server_has_the_values_that_the_real_one_has_found(tmp_path: Path) -> None:
    config = ServerConfig().replace(
        schedule_policy="priority", priority_preemption_threshold=3, fair_tenants=True,
        journal="/tmp/j", dp=2, queue_timeout=3.0,
    )  # fmt: skip
    replicas = [{"pages_total": 64}, {"pages_total": 64}]
    info = {**INFO, "pages_total": 128, "chunked_prefill_size": None, "replicas": replicas}
    was = config_as_it_was(config, info)
    words = " ".join(simulator_flags(was))
    for part in (
        "--chunked-prefill-size -1",
        "--max-total-tokens 1024",
        "--fair-clients",
        "--replicas 2 --load-balance-method cache-aware",
        "--queue-timeout 3.0",
    ):
        assert part in words
    for part in ("--journal ", "--fair-tenants"):
        assert part not in words
    assert "--cost-model" not in words
    file = tmp_path / "model.json"
    file.write_text("{}")
    assert f"--cost-model {file}" in " ".join(
        simulator_flags(was.replace(what_if_cost_model=str(file)))
    )
    other = simulator_flags(with_flags(was, {"--schedule-policy": "fcfs", "dp": 1}))
    assert "--priority-preemption-threshold" not in other and "--replicas" not in other
    apart = " ".join(simulator_flags(with_flags(was, {"prefill_replicas": 1})))
    assert "--replicas 2 --load-balance-method cache-aware --prefill-replicas 1" in apart
    with pytest.raises(ConfigError, match="start with --dp 3"):
        with_flags(was, {"prefill_replicas": 2})
    with pytest.raises(ConfigError, match="no flag that can be simulated"):
        with_flags(was, {"cost_model": "/etc/passwd"})
