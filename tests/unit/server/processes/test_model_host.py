"""Loads, pauses and ends of models whose processes only note what they are sent."""

import json
import os
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest

from quadriga.errors import ConfigError
from quadriga.server.config.server_config import ServerConfig
from quadriga.server.processes.control_channel import EXIT_OK, Command
from quadriga.server.processes.model_host import GIB, ModelHost, with_preloads
from quadriga.server.processes.model_processes import ModelPlan, ModelProcesses
from quadriga.server.processes.model_turns import FAILED_FOR_S, ModelTurns, ModelUse
from quadriga.server.processes.process_name import ProcessName
from quadriga.server.processes.replicas import FRONTEND, SCHEDULER, WORKER

LOAD_TIMEOUT_S = 60.0


class FakeProcess:
    """A process that was started, and has nothing to do."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_ready = self.has_exited = self.is_abandoned = False
        self.is_running = True
        self.was_reloaded = False
        self.info: dict[str, Any] = {}
        self.process = SimpleNamespace(pid=os.getpid(), returncode=None)
        self.sent: list[Command] = []

    def send(self, command: Command, argument: str = "") -> None:
        self.sent.append(command)

    def stop_for_reload(self) -> None:
        self.was_reloaded = self.is_running

    def exit(self, code: int) -> None:
        self.is_ready = self.is_running = False
        self.has_exited, self.process.returncode = True, code


class FakeServer:
    """Starts fake processes, unless the system has no room for one."""

    def __init__(self) -> None:
        self.children: dict[str, FakeProcess] = {}
        self.later: set[str] = set()
        self.is_full = False

    def __contains__(self, name: str) -> bool:
        return name in self.children

    def __getitem__(self, name: str) -> FakeProcess:
        return self.children[name]

    def start(self, name: str) -> None:
        if self.is_full:
            raise OSError("no room")
        self.children[name] = FakeProcess(name)

    def start_later(self, name: str, _delay_s: float) -> None:
        self.later.add(name)

    def abandon(self, names: Iterable[str]) -> None:
        for name in names:
            self.later.discard(name)
            if name in self.children:
                self.children[name].is_abandoned = True
                self.children[name].exit(-9)


class Hosted:
    """Models a and b with a memory budget for one of them; `dp` replicas each."""

    def __init__(
        self,
        dp: int = 1,
        budget: int | None = GIB,
        names: tuple[str, ...] = ("a", "b"),
        **fields: Any,
    ) -> None:
        config = ServerConfig().replace(dp=dp, **fields)
        plans = [ModelPlan(name, config, [], num_bytes=GIB) for name in names]
        self.server, self.now = FakeServer(), 0.0
        self.models = {p.name: ModelProcesses(p, n) for n, p in enumerate(plans)}
        uses = {plan.name: ModelUse(plan.num_bytes) for plan in plans}
        self.host = ModelHost(
            list(self.models.values()),
            ModelTurns(uses, budget, longest_turn_s=10.0),
            lambda _: None,
            lambda: self.now,
        )
        self.host.begin_to_serve(LOAD_TIMEOUT_S)
        for model in self.models.values():
            model.open(self.server)  # type: ignore[arg-type]
            model.start()
            for child in model:
                child.is_ready = True  # type: ignore[misc]

    @property
    def states(self) -> dict[str, str]:
        return {name: said["state"] for name, said in json.loads(self.host.states).items()}

    def process(self, program: str, model: str, replica: int | None = None) -> FakeProcess:
        return self.server[str(ProcessName(program, replica, model))]

    def pass_time(self, seconds: float = 0.0) -> None:
        self.now += seconds
        self.host.act()

    def open(self, name: str, num_open: int = 5) -> None:
        self.host.on_open(name, num_open)
        self.pass_time()

    def make_ready(self, name: str) -> None:
        """Let the workers of a model that is loaded become ready."""
        for worker in self.models[name].workers:
            if not worker.has_exited:
                worker.is_ready = True  # type: ignore[misc]
        self.host.on_ready(name)
        self.pass_time()

    def suspend_a(self) -> None:
        """Load a, and let its turn be over while requests wait for b."""
        self.open("a")
        self.make_ready("a")
        self.open("b")
        self.pass_time(20.0)
        assert self.states == {"a": "unloading", "b": "unloaded"}

    def pauses(self, model: str, replica: int | None = None) -> int:
        return self.process(SCHEDULER, model, replica).sent.count(Command.PAUSE)


def test_a_suspended_model_is_ended_once_its_scheduler_has_paused_and_the_other_is_loaded() -> None:
    one = Hosted()
    one.suspend_a()
    one.pass_time(1.0)
    assert one.process(WORKER, "a").is_ready, "a step may be in flight"
    one.host.on_paused("a", f"{SCHEDULER}@a", 1)
    one.pass_time()
    assert one.process(WORKER, "a").is_abandoned
    assert one.states == {"a": "unloaded", "b": "loading"}


def test_a_scheduler_that_dies_while_it_is_to_pause_is_asked_again_when_it_is_back() -> None:
    one = Hosted()
    one.suspend_a()
    one.host.on_ready("a")
    one.pass_time()
    assert one.pauses("a") == 2 and one.process(WORKER, "a").is_ready
    one.host.on_paused("a", f"{SCHEDULER}@a", 1)
    one.pass_time()
    assert one.states["b"] == "loading"


def test_a_worker_that_died_before_its_model_is_suspended_is_not_waited_for() -> None:
    one = Hosted()
    one.open("a")
    one.make_ready("a")
    one.process(WORKER, "a").exit(-9)
    one.open("b")
    one.pass_time(20.0)
    one.pass_time()
    assert one.states == {"a": "unloaded", "b": "loading"}
    assert one.process(WORKER, "a").is_abandoned, "it is not restarted"


def test_a_worker_that_dies_while_its_model_is_suspended_ends_its_replica_alone() -> None:
    one = Hosted(dp=2)
    one.suspend_a()
    one.process(WORKER, "a", 0).exit(-9)
    assert one.host.is_unloading("a")
    one.pass_time()
    assert one.process(WORKER, "a", 1).is_ready and one.states["a"] == "unloading"
    one.host.on_paused("a", f"{SCHEDULER}/1@a", 1)
    one.pass_time()
    assert one.states["a"] == "unloaded"


def test_two_models_that_become_idle_at_once_are_both_unloaded() -> None:
    one = Hosted(budget=None)
    for name in ("a", "b"):
        one.host.load(name)
        one.pass_time()
        one.make_ready(name)
        one.open(name, 0)
    for name in ("a", "b"):
        one.host.unload(name)
        one.open(name, 0)
    for name in ("a", "b"):
        one.host.on_paused(name, f"{SCHEDULER}@{name}", 1)
    one.pass_time()
    assert one.states == {"a": "unloaded", "b": "unloaded"}


def test_a_load_that_takes_too_long_fails_and_is_tried_again_later() -> None:
    one = Hosted()
    one.open("a")
    assert one.host.seconds_to_next() == LOAD_TIMEOUT_S
    one.pass_time(LOAD_TIMEOUT_S)
    assert one.states["a"] == "failed" and one.process(WORKER, "a").is_abandoned
    assert one.process(SCHEDULER, "a").sent == [Command.FAIL_ALL]
    one.pass_time(FAILED_FOR_S)
    assert one.states["a"] == "loading", "its requests came after the failure"


def test_a_load_that_fails_leaves_the_memory_to_the_other_model() -> None:
    one = Hosted()
    one.open("a")
    one.open("b")
    assert one.host.on_load_failed("a", "its file is gone")
    one.pass_time()
    assert one.states == {"a": "failed", "b": "loading"}
    assert not one.host.on_load_failed("a", "again")


def test_a_load_that_the_system_has_no_room_for_is_tried_again() -> None:
    one = Hosted()
    one.server.is_full = True
    one.open("a")
    assert one.server.later == {f"{WORKER}@a"} and one.states["a"] == "loading"
    assert one.host.on_load_failed("a", "given up")
    assert one.server.later == set()


def test_a_lost_model_takes_no_part_any_more() -> None:
    one = Hosted()
    one.suspend_a()
    one.host.forget("a")
    one.pass_time()
    assert one.states == {"b": "loading"}
    one.host.on_open("a", 3)
    one.host.on_ready("a")
    one.host.on_paused("a", f"{SCHEDULER}@a", 1)
    one.host.load("a")
    one.host.unload("a")
    assert not one.host.on_load_failed("a", "late") and not one.host.is_unloading("a")
    one.pass_time()
    assert one.states == {"b": "loading"}


def test_a_model_whose_clients_have_everything_is_over_once_its_worker_is_gone() -> None:
    one = Hosted()
    one.open("a")
    one.make_ready("a")
    model = one.models["a"]
    one.process(FRONTEND, "a").exit(EXIT_OK)
    assert not model.is_over, "its worker still has its memory"
    one.process(WORKER, "a").exit(EXIT_OK)
    assert model.is_over
    assert not one.models["b"].is_over, "it has no worker, and open requests perhaps"


def test_a_drain_loads_models_for_open_requests_alone() -> None:
    one = Hosted()
    one.open("a")
    one.host.load("b")
    one.host.begin_drain()
    one.make_ready("a")
    one.open("a", 0)
    one.pass_time(20.0)
    assert one.states == {"a": "loaded", "b": "unloaded"}
    one.open("b")
    one.host.on_paused("a", f"{SCHEDULER}@a", 1)
    one.pass_time()
    assert one.states == {"a": "unloaded", "b": "loading"}


@pytest.mark.parametrize("dp", [1, 2])
def test_a_reload_leaves_models_alone_that_are_not_loaded(dp: int) -> None:
    one = Hosted(dp)
    one.open("a")
    one.make_ready("a")
    for model in one.models.values():
        model.replicas.begin_reload(model.workers)
        model.replicas.reload_next(model)
    sent = {name: one.process(FRONTEND, name).sent.count(Command.RECALL) for name in ("a", "b")}
    assert sent == {"a": 1, "b": 0}
    one.suspend_a()
    for scheduler in one.models["a"].schedulers:
        one.host.on_paused("a", scheduler.name, 1)
    one.pass_time()
    model = one.models["a"]  # unloaded now, in the middle of its reload
    model.replicas.begin_reload(model.workers)
    model.replicas.reload_next(model)
    assert one.process(FRONTEND, "a").sent.count(Command.RECALL) == 1


def test_open_requests_are_asked_for_once_a_client_wants_a_model_unloaded() -> None:
    one = Hosted(budget=None)
    one.host.load("a")
    one.pass_time()
    one.make_ready("a")
    frontend = one.process(FRONTEND, "a")
    one.host.on_frontend_ready("a")
    assert frontend.sent == [], "nothing depends on them"
    for _ in range(3):
        one.host.keep("a", 30.0)
    one.pass_time(60.0)
    assert set(frontend.sent) == {Command.REPORT_LOAD} and one.states["a"] == "loaded"
    one.open("a", 1)
    one.pass_time(60.0)
    assert one.states["a"] == "loaded", "it is busy"
    frontend.sent.clear()
    one.host.on_frontend_ready("a")
    assert frontend.sent == [Command.REPORT_LOAD], "a new frontend does not know of it"
    one.open("a", 0)
    one.pass_time(30.0)
    assert one.states["a"] == "unloading"


def test_a_model_that_is_to_be_unloaded_is_asked_for_its_open_requests_of_now() -> None:
    one = Hosted(budget=None)
    one.open("a", 1)
    one.make_ready("a")
    one.host.unload("a")
    assert one.process(FRONTEND, "a").sent[-1] is Command.REPORT_LOAD
    one.open("a", 0)
    assert one.states["a"] == "unloading", "the report of its request was old"
    one.host.on_paused("a", f"{SCHEDULER}@a", 1)
    one.open("a", 1)
    one.make_ready("a")
    one.host.unload("a")
    one.open("a", 1)
    one.open("a", 0)
    assert one.states["a"] == "loaded", "it was busy"


def test_lines_about_the_only_model_have_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    one = Hosted(budget=None, names=("",), served_model_name="the-only-one")
    one.open("", 2)
    one.make_ready("")
    one.open("", 0)
    one.host.unload("")
    one.open("", 0)
    one.host.on_paused("", SCHEDULER, 1)
    one.pass_time()
    one.open("", 1)
    one.host.on_load_failed("", "its file is gone")
    lines = [line for line in capsys.readouterr().err.splitlines() if "model" in line]
    assert len(lines) == 5 and all("model the-only-one " in line for line in lines), lines


def test_a_budget_must_hold_each_model_beside_those_that_are_never_unloaded() -> None:
    plans = [ModelPlan(name, ServerConfig(), [], num_bytes=GIB) for name in ("a", "b")]
    decided = with_preloads(plans, [None, None], GIB)
    assert [plan.preload for plan in decided] == [True, False]
    plans[0] = plans[0]._replace(is_pinned=True)
    with pytest.raises(ConfigError, match="never unloaded"):
        with_preloads(plans, [None, None], GIB)
    assert with_preloads(plans, [None, None], 2 * GIB)[1].preload
