"""How far a request is: its place, the estimate of its wait, and the share of its prompt."""

from typing import Any

import msgspec
import pytest

from quadriga.server.config.engine_args import SchedulerArgs
from quadriga.wire.client import RequestProgress, RequestState
from quadriga.wire.to_detok import ProgressReply
from quadriga.wire.to_scheduler import ProgressRequest
from scheduler_proc.scheduler import MAX_AGE_S, ProgressReport
from tests.unit.simulation import STEP_S, World, submit

PREPARING, QUEUED, PREFILL, DECODING, UNKNOWN = RequestState


def progress(world: World, *names: str, **fields: Any) -> list[RequestProgress]:
    """Return the progress of requests of the client b"c", computed again."""
    report = ProgressReport(world.scheduler.lifecycle, world.scheduler.costs, 2000)
    return report.values(ProgressRequest(b"c", "q", list(names), **fields), world.worker.now)


def test_a_request_is_queued_then_in_prefill_then_decoding_then_unknown() -> None:
    args = SchedulerArgs(max_running_requests=1, max_batch_size=1, chunked_prefill_size=4)
    world = World(args)
    world.send(submit("first", [9] * 40, 8, ignore_eos=True), submit("second", [7] * 8, 4))
    seen = set()
    while True:
        first, second = progress(world, "first", "second")
        if first.state is UNKNOWN:
            break
        seen.add((first.state, first.num_computed_tokens))
        assert (second.state, second.place, second.num_prompt_tokens) == (QUEUED, 1, 8)
        world.step()
    assert {(PREFILL, 8), (PREFILL, 36), (DECODING, 40)} <= seen
    assert first == RequestProgress(UNKNOWN)


def test_ids_that_are_unknown_or_of_another_client_or_being_prepared_are_told_apart() -> None:
    world = World(SchedulerArgs())
    world.send(submit("theirs", [9], client=b"d"))
    names = ("theirs", "never", "soon", "")
    states = [value.state for value in progress(world, *names, preparing=["soon"])]
    assert states == [UNKNOWN, UNKNOWN, PREPARING, UNKNOWN]


def test_of_several_choices_the_furthest_counts() -> None:
    world = World(SchedulerArgs(max_running_requests=1, max_batch_size=1))
    message = submit("several", [9] * 4, 8, ignore_eos=True)
    params = msgspec.structs.replace(message.params, n=3)
    world.send(submit("one", [7] * 4, 3, ignore_eos=True))
    world.send(msgspec.structs.replace(message, params=params))
    world.step()
    assert [(value.state, value.place) for value in progress(world, "several")] == [(QUEUED, 1)]
    while progress(world, "one")[0].state is not UNKNOWN:
        world.step()
    world.step()
    world.step()
    assert progress(world, "several")[0].state is DECODING


def test_a_retracted_request_is_queued_again() -> None:
    args = SchedulerArgs(max_running_requests=4, max_batch_size=4, schedule_conservativeness=0.01)
    world = World(args, num_pages=6, page_size=4)
    names = ("a", "b", "c")
    world.send(*(submit(name, [9 + len(name)] * 4, 12, ignore_eos=True) for name in names))
    while not world.scheduler.lifecycle.core.num_retractions:
        assert world.step()
    assert QUEUED in [value.state for value in progress(world, *names)]


def test_each_request_waits_for_the_ones_before_it_at_the_speed_of_decode_steps() -> None:
    world = World(SchedulerArgs(max_running_requests=1, max_batch_size=1))
    world.send(submit("running", [9] * 4, 40, ignore_eos=True), submit("next", [7] * 4, 20))
    world.send(submit("last", [7] * 4, 4))
    assert progress(world, "next")[0].wait_s is None
    for _ in range(10):
        world.step()
    following, last = progress(world, "next", "last")
    assert following.wait_s is not None and last.wait_s is not None
    real: dict[str, float] = {}
    asked_at = world.worker.now
    while len(real) < 2:
        for name, value in zip(("next", "last"), progress(world, "next", "last"), strict=True):
            if value.state is not QUEUED:
                real.setdefault(name, world.worker.now - asked_at)
        world.step()
    assert following.wait_s == pytest.approx(real["next"], rel=0.1)
    # Nothing has ended yet that says how early answers stop.
    assert last.wait_s >= following.wait_s + 15 * STEP_S


def test_with_free_slots_a_request_waits_for_the_prompts_before_it() -> None:
    args = SchedulerArgs(max_running_requests=32, chunked_prefill_size=16)
    world = World(args, num_pages=256)
    world.send(*(submit(str(number), [9 + number] * 16, 2) for number in range(8)))
    for _ in range(3):
        world.step()
    values = progress(world, *map(str, range(8)))
    waits = [value.wait_s for value in values if value.state is QUEUED]
    assert len(waits) >= 3 and None not in waits
    assert waits == sorted(waits, key=lambda wait: wait or 0.0) and waits[-1]


def test_the_queue_is_read_once_for_all_questions_of_a_moment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(SchedulerArgs(max_running_requests=4, max_queued_requests=2000))
    world.checked = False
    world.send(*(submit(str(number), [9] * 100, 4) for number in range(1000)))
    waiting, num_reads = world.scheduler.lifecycle.core.waiting, 0
    read = waiting.first

    def count(*arguments: Any) -> list[Any]:
        nonlocal num_reads
        num_reads += 1
        return read(*arguments)

    monkeypatch.setattr(waiting, "first", count)
    report = ProgressReport(world.scheduler.lifecycle, world.scheduler.costs, 2000)
    for begin in range(8, 968, 64):  # the first ones run
        names = [str(number) for number in range(begin, begin + 64)]
        values = report.values(ProgressRequest(b"c", "q", names), world.worker.now)
        assert {value.state for value in values} == {QUEUED}
    assert num_reads == 1
    report.values(ProgressRequest(b"c", "q", ["5"]), world.worker.now + MAX_AGE_S)
    assert num_reads == 2


def test_the_scheduler_answers_by_way_of_the_detokenizer() -> None:
    sent: list[Any] = []
    world = World(SchedulerArgs(), observe=lambda name, message: sent.append(message))
    world.send(ProgressRequest(b"c", "q", ["a"]))
    replies = [message for message in sent if isinstance(message, ProgressReply)]
    assert [(r.client, r.progress.request_id) for r in replies] == [(b"c", "q")]
