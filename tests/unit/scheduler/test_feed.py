"""The live feed: what its messages say, that they are bounded, and that they change no decision."""

import random
from typing import Any

import msgspec
import pytest

from quadriga.server.config.engine_args import SchedulerArgs
from quadriga.wire.grammar import GrammarForm
from quadriga.wire.live import (
    MAX_LIVE_ROWS,
    MAX_LIVE_WAITING,
    EventKind,
    LiveEvent,
    LiveStep,
    RowKind,
    SkipReason,
)
from quadriga.wire.to_detok import LiveFrame
from quadriga.wire.to_scheduler import AbortRequest, WatchSteps
from quadriga.wire.worker import GrammarReady
from scheduler_proc.journal.writer import NoJournal
from scheduler_proc.scheduler import Scheduler
from tests.unit import decisions, simulation
from tests.unit.decision_log import DecisionLog
from tests.unit.decision_traces import TRACES
from tests.unit.simulation import Detok, ObservedLink, World, submit

DECODE, PREFILL, CHUNK, RECOMPUTE = RowKind


class Viewer:
    """A world whose feed is watched."""

    def __init__(self, args: SchedulerArgs, **world: Any) -> None:
        self.messages: list[LiveStep] = []
        self.world = World(args, observe=self.observe, **world)
        self.world.send(WatchSteps(30.0, is_new=True))

    def observe(self, _link: str, message: msgspec.Struct) -> None:
        if isinstance(message, LiveFrame):
            self.messages.append(msgspec.msgpack.decode(message.frame, type=LiveStep))

    @property
    def steps(self) -> list[LiveStep]:
        """The messages about steps."""
        return [message for message in self.messages if message.step >= 0]

    @property
    def names(self) -> dict[int, str]:
        return {r.seq: r.request_id for message in self.messages for r in message.requests}

    def events(self, kind: EventKind) -> list[tuple[str, str]]:
        """Return the request and detail of each event of a kind."""
        names = self.names
        found = [event for message in self.messages for event in message.events]
        return [(names.get(e.seq, "?"), e.detail) for e in found if e.kind is kind]

    def reasons(self, name: str) -> list[SkipReason]:
        """Return why a request was in none of the steps in which it was not."""
        (seq,) = (seq for seq, known in self.names.items() if known == name)
        return [
            reason for step in self.steps for reason, seqs in step.skipped.items() if seq in seqs
        ]


def test_no_message_is_made_while_no_client_watches() -> None:
    viewer = Viewer(SchedulerArgs())
    viewer.world.send(WatchSteps(0.0))
    num_before = len(viewer.messages)
    viewer.world.send(submit("a", [9] * 8, 4))
    viewer.world.run()
    assert num_before == 1 and len(viewer.messages) == num_before


def test_a_subscription_that_is_not_renewed_ends() -> None:
    viewer = Viewer(SchedulerArgs())
    viewer.world.worker.now += 31.0
    viewer.world.send(submit("a", [9] * 8, 8, ignore_eos=True))
    viewer.world.run()
    assert len(viewer.steps) == 1


def test_each_step_has_one_message_with_its_rows() -> None:
    viewer = Viewer(SchedulerArgs(chunked_prefill_size=8))
    viewer.world.send(submit("a", [9] * 20, 3, ignore_eos=True))
    viewer.world.run()
    rows = [(step.kinds, step.num_tokens) for step in viewer.steps]
    assert rows == [
        ([CHUNK], [8]),
        ([CHUNK], [8]),
        ([PREFILL], [4]),
        ([DECODE], [1]),
        ([DECODE], [1]),
    ]
    assert [step.step for step in viewer.steps] == list(range(5))
    assert [message.number for message in viewer.messages] == list(range(len(viewer.messages)))
    ended = [step for message in viewer.messages for step in message.ended_steps]
    assert ended == list(range(5))
    assert viewer.events(EventKind.FINISHED) == [("a", "length")]
    assert viewer.messages[-1].gauges.generation_tokens_total == 3


def test_an_admission_says_how_much_was_cached() -> None:
    viewer = Viewer(SchedulerArgs())
    for name in ("first", "second"):
        viewer.world.send(submit(name, [9] * 17, 2, ignore_eos=True))
        viewer.world.run()
    assert viewer.events(EventKind.ADMITTED) == [("first", "0"), ("second", "16")]
    described = [r for m in viewer.messages for r in m.requests if r.request_id == "second"]
    assert described[-1].cached_tokens == 16


def test_a_new_viewer_gets_all_requests_at_once() -> None:
    viewer = Viewer(SchedulerArgs())
    viewer.world.send(submit("a", [9] * 8, 30, ignore_eos=True))
    for _ in range(5):
        viewer.world.step()
    assert not viewer.messages[-1].is_whole and not viewer.messages[-1].requests
    viewer.world.send(WatchSteps(30.0, is_new=True))
    viewer.world.step()
    viewer.world.step()
    whole = [message for message in viewer.messages[-3:] if message.is_whole]
    assert [[request.request_id for request in message.requests] for message in whole] == [["a"]]
    assert whole[0].tree is not None and whole[0].tree.num_holders == [1]


# --- why a request is in no step ------------------------------------------------------------------


def test_a_request_without_a_slot_waits_for_slots() -> None:
    viewer = Viewer(SchedulerArgs(max_running_requests=1, max_batch_size=1))
    viewer.world.send(submit("a", [9] * 8, 6, ignore_eos=True), submit("b", [8] * 8, 2))
    viewer.world.run()
    assert set(viewer.reasons("b")) == {SkipReason.SLOTS}


def test_a_request_behind_a_long_prompt_waits_for_budget() -> None:
    viewer = Viewer(SchedulerArgs(chunked_prefill_size=8))
    viewer.world.send(submit("long", [9] * 30, 2), submit("b", [8] * 30, 2))
    viewer.world.run()
    assert viewer.reasons("b")[0] is SkipReason.BUDGET


def test_a_long_prompt_that_shorter_ones_pass_waits_for_budget() -> None:
    viewer = Viewer(SchedulerArgs(chunked_prefill_size=8))
    prompts = [submit(f"s{i}", [20 + i] * (12 - 4 * i), 2) for i in range(2)]
    viewer.world.send(submit("longer", [9] * 20, 2), submit("long", [8] * 16, 2), *prompts)
    viewer.world.run()
    assert SkipReason.BUDGET in viewer.reasons("long")


def test_a_request_without_pages_waits_for_pages() -> None:
    viewer = Viewer(SchedulerArgs(), num_pages=6)
    viewer.world.send(submit("a", [9] * 16, 6, ignore_eos=True), submit("b", [8] * 16, 2))
    viewer.world.run()
    assert SkipReason.PAGES in viewer.reasons("b")


def test_decoding_requests_wait_for_their_turn_while_a_prompt_is_computed() -> None:
    viewer = Viewer(SchedulerArgs(batch_mode="prefill-first"))
    viewer.world.send(submit("a", [9] * 8, 20, ignore_eos=True))
    viewer.world.step()
    viewer.world.send(submit("b", [8] * 8, 2))
    viewer.world.run()
    assert SkipReason.TURN in viewer.reasons("a")


def test_more_requests_than_a_step_decodes_wait_for_width() -> None:
    viewer = Viewer(SchedulerArgs(max_running_requests=3, max_batch_size=2))
    names = ("a", "b", "c")
    viewer.world.send(*(submit(name, [9 + i] * 8, 9, ignore_eos=True)
                        for i, name in enumerate(names)))  # fmt: skip
    viewer.world.run()
    assert all(SkipReason.WIDTH in viewer.reasons(name) for name in names)


def test_a_request_of_a_smaller_priority_waits_for_the_larger_ones() -> None:
    args = SchedulerArgs(schedule_policy="priority", max_running_requests=1, max_batch_size=1)
    viewer = Viewer(args)
    low, high = submit("low", [9] * 8, 4), submit("high", [8] * 8, 4)
    viewer.world.send(submit("a", [7] * 8, 3, ignore_eos=True))
    viewer.world.step()
    viewer.world.send(low, msgspec.structs.replace(high, priority=5))
    viewer.world.run()
    assert SkipReason.PRIORITY in viewer.reasons("low")
    assert SkipReason.PRIORITY not in viewer.reasons("high")


def test_a_request_of_a_busy_client_waits_for_the_others() -> None:
    args = SchedulerArgs(fair_clients=True, max_running_requests=1, max_batch_size=1)
    viewer = Viewer(args, num_pages=1024)
    viewer.world.send(*(submit(f"a{i}", [9] * 400, 4, client=b"a", ignore_eos=True)
                        for i in range(3)))  # fmt: skip
    viewer.world.send(submit("b", [8] * 400, 4, client=b"b", ignore_eos=True))
    viewer.world.run()
    assert SkipReason.FAIRNESS in viewer.reasons("a2")
    assert SkipReason.FAIRNESS not in viewer.reasons("b")


def test_a_request_waits_for_its_grammar() -> None:
    viewer = Viewer(SchedulerArgs())
    grammar = GrammarForm.of('start: "a"')
    viewer.world.send(msgspec.structs.replace(submit("g", [8] * 8, 2), grammar=grammar))
    viewer.world.send(submit("a", [9] * 8, 4, ignore_eos=True))
    viewer.world.step()
    assert set(viewer.reasons("g")) == {SkipReason.GRAMMAR}
    viewer.world.schedule([], [GrammarReady(grammar.key)])
    viewer.world.run()
    assert viewer.events(EventKind.FINISHED)


def test_requests_wait_for_the_worker_at_first() -> None:
    viewer = Viewer(SchedulerArgs())
    worker, detok = viewer.world.worker, ObservedLink("detok", Detok(), viewer.observe)
    scheduler = Scheduler(SchedulerArgs(), frozenset(), worker, detok, lambda: 1000.0, NoJournal())
    scheduler.step([submit("early", [9] * 8, 4), WatchSteps(30.0, is_new=True)], [])
    assert viewer.messages[-1].skipped.keys() == {SkipReason.WORKER}


# --- events ---------------------------------------------------------------------------------------


def test_a_retraction_is_an_event_and_its_tokens_are_computed_again() -> None:
    args = SchedulerArgs(max_running_requests=4, max_batch_size=4, schedule_conservativeness=0.01)
    viewer = Viewer(args, num_pages=6)
    viewer.world.send(*(submit(name, [9] * 4, 12, ignore_eos=True) for name in "abc"))
    viewer.world.run()
    (name, *_), *_ = viewer.events(EventKind.RETRACTED)
    (seq,) = (seq for seq, known in viewer.names.items() if known == name)
    kinds = {
        kind
        for step in viewer.steps
        for row, kind in zip(step.seqs, step.kinds, strict=True)
        if row == seq
    }
    assert RECOMPUTE in kinds
    num_retractions = viewer.world.scheduler.lifecycle.core.num_retractions
    assert viewer.messages[-1].gauges.retractions == num_retractions


def test_the_last_message_before_the_server_is_idle_has_the_tree_of_now() -> None:
    viewer = Viewer(SchedulerArgs())
    viewer.world.send(submit("one", [5] * 40, 4))
    viewer.world.run()
    last = viewer.messages[-1]
    assert last.gauges.running == last.gauges.pages_held == 0 < last.gauges.pages_cached
    assert last.tree is not None and last.tree.num_pages
    assert not any(last.tree.num_holders) and last.tree.num_shared_pages == 0


def test_a_refused_and_an_aborted_request_are_events() -> None:
    viewer = Viewer(SchedulerArgs(max_queued_requests=1, max_running_requests=1, max_batch_size=1))
    viewer.world.send(submit("a", [9] * 8, 50, ignore_eos=True))
    viewer.world.step()
    viewer.world.send(submit("b", [9] * 8, 50), submit("c", [9] * 8, 50))
    viewer.world.step()
    viewer.world.send(AbortRequest(b"c", "a"))
    viewer.world.run()
    found = [event for message in viewer.messages for event in message.events]
    assert LiveEvent(EventKind.REFUSED, 2, "queue_full") in found
    assert ("a", "abort") in viewer.events(EventKind.FINISHED)


# --- bounds ---------------------------------------------------------------------------------------


def test_a_message_lists_a_bounded_number_of_requests_and_counts_the_others() -> None:
    num_slots = MAX_LIVE_ROWS + 20
    args = SchedulerArgs(
        max_running_requests=num_slots, max_batch_size=num_slots, max_queued_requests=4096
    )
    viewer = Viewer(args, num_pages=4096, prefill_tokens=4096)
    viewer.world.send(*(submit(f"r{i}", [9 + i] * 4, 4, ignore_eos=True)
                        for i in range(num_slots + MAX_LIVE_WAITING + 30)))  # fmt: skip
    viewer.world.run()
    largest = max(viewer.steps, key=lambda step: step.num_hidden_rows)
    assert len(largest.seqs) == MAX_LIVE_ROWS and largest.num_hidden_rows == 20
    assert sum(map(len, largest.skipped.values())) == MAX_LIVE_WAITING
    assert largest.num_hidden_skipped == 30
    assert len(msgspec.msgpack.encode(largest)) < 64 * 1024


def test_a_large_prefix_tree_is_summed_up_within_the_bounds() -> None:
    rng = random.Random(1)
    viewer = Viewer(SchedulerArgs(), num_pages=8192)
    viewer.world.checked = False
    for number in range(300):
        prompt = [9] * 8 + [rng.randrange(3, 90) for _ in range(40)]
        viewer.world.send(submit(f"r{number}", prompt, 1))
        viewer.world.run()
    viewer.world.send(WatchSteps(30.0, is_new=True))
    tree = viewer.messages[-1].tree
    assert tree is not None and not tree.is_whole
    assert 64 <= len(tree.parents) <= 256
    assert tree.parents[0] == -1 and tree.num_pages[0] == 2
    assert all(parent < place for place, parent in enumerate(tree.parents))


# --- decisions ------------------------------------------------------------------------------------


class WatchedScheduler(Scheduler):
    """A scheduler whose feed never ends."""

    def step(self, messages: Any, results: Any) -> float | None:
        return super().step([WatchSteps(30.0, is_new=True), *messages], results)


class LogBesideFeed(DecisionLog):
    """A log without the messages of the feed."""

    num_live = 0

    def observe(self, message: Any, at_us: int = 0) -> None:
        if isinstance(message, LiveFrame):
            self.num_live += 1
        else:
            super().observe(message, at_us)


@pytest.mark.parametrize("trace", TRACES)
def test_a_viewer_changes_no_decision(trace: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decisions, "Scheduler", WatchedScheduler)
    names = [name for name in decisions.cases() if name.split("/")[0] == trace]
    for name in names[::3]:
        log = LogBesideFeed()
        decisions.run(name, log)
        assert log.summary == decisions.expected()[name], name
        assert log.num_live >= log.num_plans > 0


@pytest.mark.parametrize("fair_clients", [False, True])
def test_a_viewer_changes_nothing_in_random_lives(
    fair_clients: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(simulation, "Scheduler", WatchedScheduler)
    log = LogBesideFeed()
    decisions.run_chaos(2_000, 7, fair_clients, log)
    watched = log.summary
    monkeypatch.undo()
    log = LogBesideFeed()
    decisions.run_chaos(2_000, 7, fair_clients, log)
    assert log.summary == watched
