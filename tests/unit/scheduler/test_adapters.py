"""Requests wait in the scheduler until the worker has loaded their adapters."""

from typing import Any

from quadriga.sampling.params import SamplingParams
from quadriga.server.config.engine_args import SchedulerArgs
from quadriga.wire.adapter import AdapterRef
from quadriga.wire.packing import pack_ids, unpack_ids
from quadriga.wire.to_detok import StepOutput
from quadriga.wire.to_scheduler import DropAdapters, PinAdapters, Submit
from quadriga.wire.worker import (
    AdapterReady,
    EvictAdapter,
    ForgetAdapter,
    LoadAdapter,
    StepPlan,
    WorkerReady,
)
from scheduler_proc.held_requests import MAX_OVERTAKEN_A_PLACE
from tests.unit.scheduler.sampling_bench import PROMPT, Bench
from tests.unit.simulation import World, abort, reference, submit


def ref(name: str) -> AdapterRef:
    return AdapterRef(f"id of {name}", name)


class AdapterBench(Bench):
    def ask(self, name: str, adapter: str, **fields: Any) -> None:
        params = SamplingParams(max_new_tokens=4, seed=7, **fields)
        known = ref(adapter) if adapter else None
        ids = pack_ids(PROMPT)
        message = Submit(b"c", name, ids, params, True, 1.0, 1.0, adapter=known)
        self.scheduler.step([message], [])

    def ready(self, load: LoadAdapter, error: str = "") -> list[StepOutput]:
        self.scheduler.step([], [AdapterReady(load.adapter.id, load.place, error)])
        outputs, self.detok.sent = list(self.detok.sent), type(self.detok.sent)()
        return outputs

    def sent(self) -> LoadAdapter | ForgetAdapter | EvictAdapter:
        message = self.worker.sent.popleft()
        assert isinstance(message, LoadAdapter | ForgetAdapter | EvictAdapter), message
        return message

    def load(self, name: str) -> LoadAdapter:
        message = self.sent()
        assert isinstance(message, LoadAdapter) and message.adapter.name == name, message
        return message

    def end(self, name: str) -> None:
        """End a request, and answer the plan in which it is."""
        self.scheduler.step([abort(name)], [])
        rest = list(self.worker.sent)
        self.worker.sent.clear()
        for message in rest:
            if isinstance(message, StepPlan):
                self.answer(message, [5] * len(unpack_ids(message.slots)))
            else:
                self.worker.sent.append(message)


def test_a_request_waits_for_its_adapter_and_its_slot_has_the_place() -> None:
    bench = AdapterBench(max_loras=2)
    bench.ask("first", "french")
    bench.ask("second", "french")
    load = bench.load("french")
    assert not bench.worker.sent
    info = bench.scheduler.info()
    assert (info["waiting_for_adapter"], info["waiting"]) == (2, 2)
    bench.ask("base", "")
    plan = bench.plan()
    assert [new.adapter for new in plan.new] == [-1]
    bench.answer(plan, [5])
    bench.end("base")
    bench.ready(load)
    assert [new.adapter for new in bench.plan().new] == [load.place, load.place]
    assert bench.scheduler.info()["adapters"]["running"] == ["french"]


def test_an_adapter_that_cannot_be_loaded_fails_its_requests_and_may_be_tried_again() -> None:
    bench = AdapterBench(max_loras=1)
    bench.ask("a", "bad", n=2)
    closed = [end for output in bench.ready(bench.load("bad"), error="no good") for end in
              output.closed]  # fmt: skip
    assert [end.finish_reason for end in closed] == ["error", "error"]
    assert closed[0].error is not None and closed[0].error.message == "no good"
    assert bench.sent() == EvictAdapter(ref("bad").id)
    bench.ask("b", "bad")
    bench.load("bad")


def test_the_adapter_that_was_unused_for_longest_gives_its_place() -> None:
    bench = AdapterBench(max_loras=2)
    for name in ("first", "second"):
        bench.ask(name, name)
        bench.ready(bench.load(name))
        bench.end(name)
    bench.ask("again", "first")
    bench.end("again")
    bench.ask("third", "third")
    forgotten, evicted, load = bench.sent(), bench.sent(), bench.sent()
    assert isinstance(load, LoadAdapter) and load.adapter.name == "third"
    assert forgotten == ForgetAdapter(load.place)
    assert evicted == EvictAdapter(ref("second").id)
    assert bench.scheduler.info()["adapters"]["loaded"] == ["first"]


def test_an_adapter_without_a_place_stays_in_memory_until_others_need_the_room() -> None:
    bench = AdapterBench(max_loras=1, max_cpu_loras=2)

    def use(name: str) -> list[object]:
        """Return what the worker is sent before it loads the adapter."""
        bench.ask(name, name)
        before: list[object] = []
        while not isinstance(message := bench.sent(), LoadAdapter):
            before.append(message)
        assert message.adapter.name == name
        bench.ready(message)
        bench.end(name)
        return before

    def info() -> list[object]:
        adapters = bench.scheduler.info()["adapters"]
        return [adapters["loaded"], adapters["in_memory"], adapters["loads"],
                adapters["memory_loads"]]  # fmt: skip

    assert use("first") == []
    assert use("second") == [ForgetAdapter(0)]
    assert info() == [["second"], ["first", "second"], 2, 0]
    assert use("first") == [ForgetAdapter(0)]
    assert info() == [["first"], ["second", "first"], 3, 1]
    assert use("third") == [ForgetAdapter(0), EvictAdapter(ref("second").id)]
    assert info() == [["third"], ["first", "third"], 4, 1]
    bench.scheduler.step([DropAdapters([ref("first").id, ref("unknown").id])], [])
    assert bench.sent() == EvictAdapter(ref("first").id)
    assert info() == [["third"], ["third"], 4, 1]
    bench.scheduler.step([], [WorkerReady(64, 4, 16, "float32", "cpu", session=1)])
    assert info() == [[], [], 4, 1]


def loads(bench: AdapterBench) -> list[LoadAdapter]:
    """Take all that was sent to the worker, and return the loads."""
    sent = [bench.worker.sent.popleft() for _ in range(len(bench.worker.sent))]
    return [message for message in sent if isinstance(message, LoadAdapter)]


def test_a_pinned_adapter_is_loaded_without_a_request_and_keeps_its_place() -> None:
    bench = AdapterBench(max_loras=2, max_cpu_loras=2)
    bench.scheduler.step([PinAdapters([ref("kept")])], [])
    bench.ready(bench.load("kept"))
    info = bench.scheduler.info()["adapters"]
    assert (info["pinned"], info["loaded"], info["running"]) == (["kept"], ["kept"], [])
    for name in ("first", "second", "third"):
        bench.ask(name, name)
        (load,) = loads(bench)
        bench.ready(load)
        bench.end(name)
        info = bench.scheduler.info()["adapters"]
        assert set(info["loaded"]) == set(info["in_memory"]) == {"kept", name}
    bench.scheduler.step([PinAdapters([])], [])
    bench.ask("fourth", "fourth")
    loads(bench)
    assert bench.scheduler.info()["adapters"]["loaded"] == ["third"]


def test_a_pinned_adapter_gets_a_place_once_one_is_idle_and_again_from_a_new_worker() -> None:
    bench = AdapterBench(max_loras=2)
    bench.ask("a", "first")
    bench.ask("b", "second")
    for load in loads(bench):
        bench.ready(load)
    bench.scheduler.step([PinAdapters([ref("kept")])], [])
    assert bench.scheduler.info()["adapters"]["loaded"] == ["first", "second"]
    bench.end("a")
    (load,) = loads(bench)
    assert load.adapter.name == "kept"
    bench.ready(load)
    assert set(bench.scheduler.info()["adapters"]["loaded"]) == {"second", "kept"}
    bench.scheduler.step([], [WorkerReady(64, 4, 16, "float32", "cpu", session=1)])
    assert [load.adapter.name for load in loads(bench)] == ["kept", "second"]


def test_a_pinned_adapter_that_cannot_be_loaded_is_tried_once() -> None:
    bench = AdapterBench(max_loras=2)
    bench.scheduler.step([PinAdapters([ref("broken")])], [])
    bench.ready(bench.load("broken"), error="no good")
    assert bench.sent() == EvictAdapter(ref("broken").id)
    assert not bench.worker.sent and bench.scheduler.info()["adapters"]["pinned"] == []


def test_a_place_that_was_closed_for_others_opens_once_its_adapter_is_pinned() -> None:
    world = World(SchedulerArgs(max_loras=2, max_running_requests=2))
    world.send(*(_popular(i) for i in range(2)))
    world.send(*(submit(name, [9, 9], adapter=ref(name)) for name in ("other", "third")))
    sent, queue = 2, world.scheduler.lifecycle.adapters
    while not (closing := [p for p in queue._places.values() if p.is_closing]):
        world.step()
        world.send(_popular(sent), submit(f"o{sent}", [9, 8], adapter=ref("other")))
        sent += 1
        assert sent < 60
    (place,) = closing
    world.send(submit("late", [9, 7], adapter=place.adapter))
    assert any(request.adapter == place.adapter for request in queue)
    world.scheduler.lifecycle.pin_adapters([place.adapter])
    assert not place.is_closing
    assert not any(request.adapter == place.adapter for request in queue)
    world.run()
    assert len(world.detok.closed) == 2 + 2 + 2 * (sent - 2) + 1


def test_an_adapter_without_a_name_leaves_with_its_last_request() -> None:
    bench = AdapterBench(max_loras=2)
    bench.ask("a", "old")
    load = bench.load("old")
    bench.ready(load)
    bench.scheduler.step([DropAdapters([load.adapter.id])], [])
    assert bench.scheduler.info()["adapters"]["loaded"] == ["old"]
    bench.end("a")
    assert bench.sent() == ForgetAdapter(load.place)
    assert bench.sent() == EvictAdapter(load.adapter.id)
    assert bench.scheduler.info()["adapters"]["loaded"] == []


def test_a_stream_of_requests_does_not_keep_another_adapter_waiting() -> None:
    """The popular adapter has always requests, of which the last ones give way."""
    world = World(SchedulerArgs(max_loras=1, max_running_requests=2))
    other = submit("other", [9, 9], adapter=ref("other"))
    world.send(*(_popular(i) for i in range(4)), other)
    sent = 4
    while "other" not in world.detok.closed:
        world.step()
        world.send(_popular(sent))
        sent += 1
        assert sent < 40, "the other adapter starves"
    assert sent > MAX_OVERTAKEN_A_PLACE
    world.run()
    assert len(world.detok.closed) == sent + 1
    expected = reference([9, 9], 8, False, ref("other").id)
    assert world.detok.tokens["other"] == expected


def _popular(number: int) -> Submit:
    return submit(f"p{number}", [5, 6, number % 50 + 3], adapter=ref("popular"))
