"""The spans of traced requests: they follow each other without gaps, whatever happens."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest

from quadriga.server.config.engine_args import SchedulerArgs
from quadriga.wire.to_detok import StreamEnd
from quadriga.wire.to_scheduler import Submit
from quadriga.wire.trace import RequestTrace, Span, TraceContext
from scheduler_proc.state import span_recorder
from scheduler_proc.state.span_recorder import MAX_EVENTS, MAX_SPANS, SpanRecorder
from tests.unit.journal_runs import MortalWorld
from tests.unit.scheduler.sampling_bench import GRAMMAR, GrammarBench
from tests.unit.simulation import World, abort, submit

CONTEXT = TraceContext("0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331")


def traced(message: Submit) -> Submit:
    return msgspec.structs.replace(message, trace=CONTEXT)


def submit_traced(world: World, name: str, num_prompt: int, max_new_tokens: int = 6) -> None:
    """Submit a request that was received 2 ms ago and tokenized 1 ms ago."""
    message = submit(name, [len(name) + 3] * num_prompt, max_new_tokens, ignore_eos=True)
    now = world.worker.now
    times = {"received_at": now - 0.002, "tokenized_at": now - 0.001}
    world.send(traced(msgspec.structs.replace(message, **times)))


def trace_of(world: World, name: str) -> RequestTrace:
    """Return the trace of a request that has ended, after its way over the wire."""
    frame = msgspec.msgpack.encode(world.detok.closed[name])
    trace = msgspec.msgpack.decode(frame, type=StreamEnd).trace
    assert trace is not None
    return trace


def phases_of(world: World, name: str) -> list[Span]:
    """Return the phases of a request that has ended, which must be contiguous."""
    trace = trace_of(world, name)
    phases = [span for span in trace.spans if span.parent < 0]
    for phase, following in pairwise(phases):
        assert phase.ended_at == following.began_at
        assert phase.began_at <= phase.ended_at
    whole = trace.ended_at - trace.began_at
    assert sum(s.ended_at - s.began_at for s in phases) == pytest.approx(whole, abs=1e-6)
    for span in trace.spans:
        if span.parent >= 0:
            around = trace.spans[span.parent]
            assert around.began_at <= span.began_at <= span.ended_at <= around.ended_at
    return phases


def names_of(phases: list[Span]) -> list[str]:
    return [phase.name for phase in phases]


def events_of(phases: list[Span]) -> list[tuple[str, Any]]:
    return [(e.name, e.attributes.get("reason")) for phase in phases for e in phase.events]


def test_a_request_is_tokenized_queued_computed_and_decoded() -> None:
    world = World(SchedulerArgs(chunked_prefill_size=8, prefill_max_tokens=8))
    submit_traced(world, "a", 20)
    world.run()
    phases = phases_of(world, "a")
    assert names_of(phases) == ["tokenize", "queue", "prefill", "prefill", "prefill", "decode"]
    assert [phase.attributes["tokens"] for phase in phases[2:]] == [8, 8, 4, 5]
    assert phases[-1].attributes["steps"] == 5
    spans = trace_of(world, "a").spans
    assert [span.process for span in spans if span.name == "forward"] == ["worker_proc"] * 3
    attributes = trace_of(world, "a").attributes
    assert attributes["gen_ai.usage.prompt_tokens"] == 20
    assert attributes["gen_ai.usage.completion_tokens"] == 6
    assert attributes["gen_ai.response.finish_reason"] == "length"


def test_the_decode_says_how_many_rows_and_prompts_of_others_were_in_its_steps() -> None:
    world = World(SchedulerArgs(chunked_prefill_size=8, batch_mode="mixed"))
    submit_traced(world, "a", 4, 30)
    for _ in range(3):
        world.step()
    world.send(submit("one", [5] * 20, 4, ignore_eos=True))
    world.send(submit("two", [6] * 4, 4, ignore_eos=True))
    world.run()
    decode = phases_of(world, "a")[-1].attributes
    assert decode["max_rows"] == 3
    assert decode["prompt_tokens"] == 24
    assert 4 <= int(decode["prompt_parts"]) <= 5
    assert 0 < float(decode["prompt_steps_ms"]) < float(decode["compute_ms"])


def test_a_decode_without_prompts_beside_it_says_nothing_of_them() -> None:
    world = World(SchedulerArgs())
    submit_traced(world, "a", 4)
    world.run()
    attributes = phases_of(world, "a")[-1].attributes
    assert attributes["max_rows"] == 1
    assert "prompt_parts" not in attributes


def test_the_decode_counts_tokens_that_were_guessed() -> None:
    world = World(SchedulerArgs(speculative_method="ngram"), can_guess=True)
    submit_traced(world, "a", 4, 40)
    world.run()
    decode = phases_of(world, "a")[-1]
    assert decode.attributes["tokens"] == 39, "those after the first one"
    assert int(decode.attributes["steps"]) < 30


def test_other_requests_have_no_recorder_and_no_trace() -> None:
    world = World(SchedulerArgs())
    world.send(submit("a", [3] * 4, 4))
    assert not world.scheduler.lifecycle.tracer.live
    world.run()
    assert world.detok.closed["a"].trace is None


def test_the_queue_says_what_the_plans_lacked() -> None:
    args = SchedulerArgs(max_running_requests=1, max_batch_size=1)
    world = World(args)
    world.send(submit("first", [9] * 4, 8, ignore_eos=True))
    world.step()
    submit_traced(world, "second", 4)
    world.run()
    phases = phases_of(world, "second")
    assert names_of(phases)[1] == "queue"
    assert ("waits", "slots") in events_of(phases)
    (queued,) = [event for event in phases[1].events if event.name == "queued"]
    assert queued.attributes == {"waiting_before": 0}
    assert trace_of(world, "second").attributes["quadriga.waited_for"] == "slots"


def test_a_retracted_request_is_queued_and_computed_again() -> None:
    world = World(SchedulerArgs(schedule_conservativeness=0.01), num_pages=8, page_size=4)
    for name in ("a", "bb", "ccc"):
        submit_traced(world, name, 4, 20)
    world.run()
    retracted = [
        name for name in ("a", "bb", "ccc")
        if trace_of(world, name).attributes["quadriga.retractions"]
    ]  # fmt: skip
    assert retracted
    for name in ("a", "bb", "ccc"):
        names = names_of(phases_of(world, name))
        assert (names.count("queue") > 1) == (name in retracted), names
    phases = phases_of(world, retracted[0])
    assert ("retracted", "pages") in events_of(phases)
    again = [phase for phase in phases if phase.attributes.get("after") == "retraction"]
    assert again
    assert names_of(phases)[-1] == "decode"


def test_a_worker_restart_is_a_phase_between_two_queues() -> None:
    world = World(SchedulerArgs())
    submit_traced(world, "a", 6, 12)
    for _ in range(4):
        world.step()
    world.restart_worker()
    world.run()
    phases = phases_of(world, "a")
    expected = ["tokenize", "queue", "prefill", "decode", "worker restart", "queue", "prefill"]
    assert names_of(phases) == [*expected, "decode"]
    assert phases[5].attributes == {"after": "worker restart"}
    decoded = [phase.attributes["tokens"] for phase in phases if phase.name == "decode"]
    assert sum(map(int, decoded)) == 12 - 2  # each prefill samples one


def test_a_worker_that_dies_in_the_first_chunk_leaves_a_restart_in_its_place() -> None:
    world = World(SchedulerArgs())
    submit_traced(world, "a", 6)
    world.pass_batch_delay()
    world.num_crashes = 1  # the next one has no late result
    world.restart_worker()
    world.run()
    names = names_of(phases_of(world, "a"))
    assert names == ["tokenize", "queue", "worker restart", "queue", "prefill", "decode"]


def test_a_request_that_waits_notes_the_restarts_of_all_processes() -> None:
    world = World(SchedulerArgs(max_running_requests=1, max_batch_size=1))
    world.send(submit("first", [9] * 4, 8, ignore_eos=True))
    world.step()
    submit_traced(world, "second", 4)
    world.restart_worker()
    world.kill_detok()
    world.restart_detok()
    world.run()
    names = [name for name, _ in events_of(phases_of(world, "second"))]
    assert "worker ready" in names
    assert "detokenizer ready" in names


def test_a_scheduler_restart_is_a_phase_and_what_the_journal_knows_comes_before(
    tmp_path: Path,
) -> None:
    world = MortalWorld(SchedulerArgs(max_running_requests=1, max_batch_size=1), tmp_path)
    submit_traced(world, "a", 6, 12)
    submit_traced(world, "bb", 6, 3)
    for _ in range(4):
        world.step()
    world.worker.now += 0.5
    world.restart_scheduler()
    world.run()
    names = names_of(phases_of(world, "a"))
    assert names[:4] == ["tokenize", "queue and prefill", "decode", "scheduler restart"]
    assert names[-3:] == ["queue", "prefill", "decode"]
    names = names_of(phases_of(world, "bb"))
    assert names == ["tokenize", "scheduler restart", "queue", "prefill", "decode"]
    assert trace_of(world, "bb").context == CONTEXT


def test_an_aborted_request_ends_where_it_stands() -> None:
    world = World(SchedulerArgs(max_running_requests=1, max_batch_size=1))
    submit_traced(world, "a", 6, 50)
    submit_traced(world, "bb", 6, 50)
    for _ in range(4):
        world.step()
    world.send(abort("a"), abort("bb"))
    assert names_of(phases_of(world, "a"))[-1] == "decode"
    assert names_of(phases_of(world, "bb")) == ["tokenize", "queue"]
    assert not world.scheduler.lifecycle.tracer.live
    world.run()


def test_a_refused_request_has_its_error() -> None:
    world = World(SchedulerArgs(), num_pages=2, page_size=4)
    submit_traced(world, "a", 60)
    assert trace_of(world, "a").error.startswith("prompt_too_long: ")


def test_each_choice_has_its_own_spans() -> None:
    world = World(SchedulerArgs())
    seen: list[RequestTrace] = []
    message = traced(submit("a", [5] * 4, 3, ignore_eos=True))
    params = msgspec.structs.replace(message.params, n=2, seed=1)

    def see(message: msgspec.Struct) -> None:
        seen.extend(end.trace for end in getattr(message, "closed", ()))

    world.detok.send = see  # type: ignore[method-assign]
    world.send(msgspec.structs.replace(message, params=params))
    world.run()
    assert sorted(trace.index for trace in seen) == [0, 1]
    assert {trace.attributes["gen_ai.request.n"] for trace in seen} == {2}


def test_a_request_that_waits_for_its_grammar_says_so() -> None:
    bench = GrammarBench()
    message = submit("a", [5] * 4, 3, ignore_eos=True)
    bench.scheduler.step([traced(msgspec.structs.replace(message, grammar=GRAMMAR))], [])
    bench.ready()
    (request,) = bench.scheduler.lifecycle.tracer.live.values()
    assert request.trace is not None
    assert events_of(request.trace.spans) == [
        ("queued", None),
        ("waits", "grammar"),
        ("compiled", "grammar"),
    ]


def test_phases_and_events_are_bounded_and_still_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = SpanRecorder(CONTEXT, 1.0, 2.0)
    for number in range(3 * MAX_SPANS):
        recorder.event("retracted", 2.5 + number)
        recorder.enter(span_recorder.QUEUE, 3.0 + number, after="retraction")
    recorder.finish(1e6)
    assert len(recorder.spans) <= MAX_SPANS + 2
    assert sum(len(span.events) for span in recorder.spans) == MAX_EVENTS
    assert recorder.spans[-1].ended_at == 1e6
    assert recorder.spans[-1].attributes["merged_phases"] == 2 * MAX_SPANS + 1
    assert sum(span.ended_at - span.began_at for span in recorder.spans) == pytest.approx(1e6 - 1)


def test_times_out_of_order_do_not_make_a_phase_negative() -> None:
    recorder = SpanRecorder(CONTEXT, 1.0, 2.0)
    recorder.enter(span_recorder.PREFILL, 1.5)
    recorder.finish(1.0)
    assert [(s.began_at, s.ended_at) for s in recorder.spans] == [(1.0, 2.0)]
