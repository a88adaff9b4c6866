"""Crashes of worker, detokenizer and frontend lose nothing; a poison request is found."""

import msgspec
import pytest

from quadriga.server.config.engine_args import POLICIES, SchedulerArgs
from quadriga.wire.logprobs import LogprobBlock
from quadriga.wire.packing import unpack_ids
from quadriga.wire.to_scheduler import Drain, FrontendRestarted, Shutdown, Submit
from quadriga.wire.worker import CompileGrammar, GrammarReady, WorkerReady
from scheduler_proc.journal import detok_outbox
from scheduler_proc.journal.detok_outbox import DetokOutbox
from scheduler_proc.request_table import RequestTable
from tests.unit.scheduler.sampling_bench import GRAMMAR, GrammarBench
from tests.unit.simulation import Detok, World, abort, reference, submit

POISON = 99


def tokens_of(world: World, name: str) -> list[int]:
    return world.detok.tokens[name]


def retried(message: Submit) -> Submit:
    """Return the message as its client sends it after a reconnect."""
    return msgspec.structs.replace(message, client_retry=True)


def test_streams_go_on_as_if_nothing_had_happened_when_the_worker_dies() -> None:
    world = World(SchedulerArgs(max_batch_size=3))
    prompts = {f"r{n}": [n + 3] * (3 * n + 1) for n in range(6)}
    world.send(*(submit(name, prompt, 12, ignore_eos=True) for name, prompt in prompts.items()))
    for _ in range(8):
        for _ in range(12):
            world.step()
        world.restart_worker()
    world.run()
    for name, prompt in prompts.items():
        assert tokens_of(world, name) == reference(prompt, 12, True)
        assert world.detok.closed[name].finish_reason == "length"
    assert world.scheduler.info()["pages_held"] == 0


def test_a_suspended_worker_crashes_for_no_request_and_streams_go_on() -> None:
    world = World(SchedulerArgs(max_batch_size=3))
    prompts = {f"r{n}": [n + 3] * (3 * n + 1) for n in range(6)}
    world.send(*(submit(name, prompt, 40, ignore_eos=True) for name, prompt in prompts.items()))
    for _ in range(8):
        for _ in range(12):
            world.step()
        world.suspend_worker()
        assert all(request.worker_crashes == 0 for request in world.scheduler.lifecycle.table)
    world.run()
    for name, prompt in prompts.items():
        assert tokens_of(world, name) == reference(prompt, 40, True)
        assert world.detok.closed[name].finish_reason == "length"
    assert world.scheduler.info()["pages_held"] == 0


def test_a_paused_scheduler_takes_requests_and_aborts_and_plans_nothing() -> None:
    world = World(SchedulerArgs())
    world.send(submit("a", [5], 20, ignore_eos=True), submit("b", [6], 20, ignore_eos=True))
    world.step()
    world.scheduler.pause.begin(world.worker.session)
    world.run()
    num_steps = world.scheduler.info()["steps"]
    world.send(submit("c", [7], 20, ignore_eos=True), abort("a"))
    world.run()
    assert world.scheduler.pause.is_complete
    assert world.scheduler.info()["steps"] == num_steps
    assert world.detok.closed["a"].finish_reason == "abort"
    world.restart_worker()
    world.run()
    for name, token in (("b", 6), ("c", 7)):
        assert tokens_of(world, name) == reference([token], 20, True)


def test_nothing_that_the_crashed_worker_had_computed_counts_as_cached() -> None:
    world = World(SchedulerArgs())
    world.send(submit("a", [5] * 20, 2, ignore_eos=True))
    world.run()
    world.restart_worker()
    assert world.scheduler.info()["pages_cached"] == 0
    world.send(submit("b", [5] * 20, 2, ignore_eos=True))
    world.run()
    assert world.detok.closed["b"].cached_tokens == 0


def test_an_abort_while_no_worker_is_there_ends_the_request_once() -> None:
    world = World(SchedulerArgs())
    world.send(submit("a", [5], 20, ignore_eos=True), submit("b", [6], 20, ignore_eos=True))
    world.step()
    world.send(abort("a"))
    world.restart_worker()
    world.run()
    assert world.detok.closed["a"].finish_reason == "abort"
    assert tokens_of(world, "b") == reference([6], 20, True)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("decoded", [False, True])
def test_the_request_that_crashes_the_worker_every_time_fails_within_three_crashes_and_no_other(
    policy: str, decoded: bool
) -> None:
    world = World(SchedulerArgs(max_batch_size=4, schedule_policy=policy))
    poisoned = [7, 8, 9, 10]
    world.worker.poison = frozenset({reference(poisoned, 6, True)[5] if decoded else POISON})
    harmless = {f"r{n}": [11 + n] * (n + 1) for n in range(40)}
    answers = {name: reference(prompt, 5, True) for name, prompt in harmless.items()}
    answers = {n: a for n, a in answers.items() if not world.worker.poison & {*a, *harmless[n]}}
    assert len(answers) > 20
    for name in answers:
        world.send(submit(name, harmless[name], 5, ignore_eos=True))
    prompt = poisoned if decoded else [*poisoned, POISON]
    world.send(submit("poison", prompt, 20, ignore_eos=True))
    world.run()
    closed = world.detok.closed.pop("poison")
    assert closed.error is not None and "the worker died 3 times in a row" in closed.error.message
    assert world.num_crashes == 3
    for name, answer in answers.items():
        assert tokens_of(world, name) == answer
    assert {c.finish_reason for c in world.detok.closed.values()} == {"length"}
    assert world.scheduler.info()["pages_held"] == 0


def test_crashes_that_no_request_causes_fail_no_request() -> None:
    world = World(SchedulerArgs())
    world.send(submit("a", [5], 60, ignore_eos=True))
    while "a" not in world.detok.closed:
        for _ in range(4):  # far enough each time
            world.step()
        world.restart_worker()
    assert tokens_of(world, "a") == reference([5], 60, True)
    assert world.num_crashes > 10


def test_quarantined_requests_run_alone_until_they_have_come_further() -> None:
    world = World(SchedulerArgs(max_batch_size=8))
    world.send(*(submit(f"r{n}", [n + 3] * 3, 30, ignore_eos=True) for n in range(5)))
    world.step()
    world.restart_worker()
    world.step()
    world.restart_worker()
    world.worker.rows_of_steps.clear()
    world.run()
    widths = [len(rows) for rows in world.worker.rows_of_steps]
    alone = widths.index(5) if 5 in widths else len(widths)
    assert alone >= 5
    assert set(widths[:alone]) <= {1, 2, 3, 4}
    assert widths[:10] == [1] * 10
    assert max(widths) == 5
    for n in range(5):
        assert tokens_of(world, f"r{n}") == reference([n + 3] * 3, 30, True)


def test_a_new_worker_compiles_the_grammars_again_before_a_request_with_one_goes_on() -> None:
    bench = GrammarBench()
    bench.ask("a")
    bench.worker.sent.clear()
    bench.ready()
    bench.worker.sent.clear()
    bench.scheduler.step([], [WorkerReady(64, 4, 16, "float32", "cpu", session=2)])
    assert bench.worker.sent.popleft() == CompileGrammar(GRAMMAR)
    bench.scheduler.step([], [GrammarReady(GRAMMAR.key)])  # of the worker that crashed
    assert not bench.worker.sent
    bench.scheduler.step([], [GrammarReady(GRAMMAR.key, session=2)])
    assert len(bench.plan().new) == 1


def test_a_new_detokenizer_gets_a_replay_of_all_that_runs_and_of_every_unacknowledged_end() -> None:
    world = World(SchedulerArgs())
    world.send(submit("short", [5], 3, ignore_eos=True), submit("long", [6], 30, ignore_eos=True))
    world.step()
    world.kill_detok()
    for _ in range(6):
        world.step()
    assert not world.detok.closed
    world.restart_detok()
    assert tokens_of(world, "short") == reference([5], 3, True)
    assert world.detok.closed["short"].finish_reason == "length"
    world.run()
    assert tokens_of(world, "long") == reference([6], 30, True)


def test_the_server_does_not_stop_before_every_end_was_acknowledged() -> None:
    world = World(SchedulerArgs())
    world.send(submit("a", [5], 3, ignore_eos=True))
    world.kill_detok()
    world.send(Drain())
    world.run()
    assert not world.detok.drained
    world.restart_detok()
    assert world.detok.closed["a"].finish_reason == "length"
    assert len(world.detok.drained) == 1


def test_a_server_whose_frontend_crashed_does_not_stop_before_its_clients_could_return() -> None:
    world = World(SchedulerArgs())
    world.send(submit("a", [5], 3, ignore_eos=True))
    world.send(Drain())  # sent by the frontend that crashed
    world.run()
    assert len(world.detok.drained) == 1 and not world.scheduler.stopped
    world.send(retried(submit("a", [5], 3, ignore_eos=True)))
    assert world.detok.replayed[-1].closing is not None
    world.send(Drain())
    assert len(world.detok.drained) == 2
    world.send(Shutdown())
    assert world.scheduler.stopped


def test_logprobs_of_requests_that_ended_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detok_outbox, "MAX_REMEMBERED_BYTES", 20_000)
    table, outbox = RequestTable(frozenset()), DetokOutbox(Detok())
    for number in range(100):
        (request,) = table.add(submit(f"r{number}", [5] * 10))
        if number % 2:
            request.logprobs = [LogprobBlock(b"1234", 20, b"1234" * 20, b"1234" * 20)] * 10
        outbox.finish(request)
        outbox.acknowledge({request.seq: 0})
    remembered = [n for n in range(100) if outbox.ended_choices(submit(f"r{n}", [5]), True)]
    assert remembered == list(range(remembered[0], 100))
    assert 10 <= len(remembered) < 30


def test_a_request_that_is_sent_again_is_replayed_and_runs_once() -> None:
    world = World(SchedulerArgs())
    world.send(submit("a", [5], 10, ignore_eos=True))
    world.step()
    world.step()
    retry = retried(submit("a", [5], 10, ignore_eos=True))
    world.send(retry)
    replay = world.detok.replayed.pop()
    assert replay.closing is None
    assert unpack_ids(replay.token_ids).tolist() == tokens_of(world, "a")
    world.run()
    world.send(retry)
    replay = world.detok.replayed.pop()
    assert unpack_ids(replay.token_ids).tolist() == reference([5], 10, True)
    assert replay.closing is not None and replay.closing.finish_reason == "length"
    assert world.scheduler.info()["generation_tokens_total"] == 10


def test_a_replay_asked_for_while_there_is_no_detokenizer_comes_from_the_next_one() -> None:
    world = World(SchedulerArgs())
    ended, runs = submit("ended", [5], 3, ignore_eos=True), submit("runs", [6], 9, ignore_eos=True)
    world.send(ended)
    world.run()
    world.send(runs)
    world.kill_detok()
    world.send(retried(ended), retried(runs), Drain())
    world.detok.replayed.clear()
    world.restart_detok()
    assert sorted(replay.opening.request_id for replay in world.detok.replayed) == ["ended", "runs"]
    world.kill_detok()  # it had passed the end on, and the running stream is lost
    world.detok.replayed.clear()
    world.restart_detok()
    assert [replay.opening.request_id for replay in world.detok.replayed] == ["runs"]
    world.run()
    assert tokens_of(world, "runs") == reference([6], 9, True)
    assert len(world.detok.drained) == 1


def test_a_server_does_not_stop_before_a_client_that_retried_has_its_replay() -> None:
    world = World(SchedulerArgs())
    world.send(submit("a", [5], 3, ignore_eos=True))
    world.run()
    world.kill_detok()
    world.send(retried(submit("a", [5], 3, ignore_eos=True)), Drain())
    world.detok.session = 1  # it runs, but has not reported yet
    world.scheduler.step([], [])
    assert not world.detok.drained
    world.restart_detok()
    world.scheduler.step([], [])
    assert len(world.detok.drained) == 1


def test_a_new_frontend_gets_the_ends_that_the_crashed_one_did_not_deliver() -> None:
    world = World(SchedulerArgs())
    world.send(submit("delivered", [5], 3, ignore_eos=True))
    world.run()
    world.checked = False
    world.schedule([submit("lost", [6], 3, ignore_eos=True), Drain()], [])
    world.pass_batch_delay()
    while (result := world.worker.run_one()) is not None:
        world.schedule([], [result])
    world.detok.ended.clear()  # the frontend crashes, too
    del world.detok.closed["lost"]
    assert not world.detok.drained
    world.send(FrontendRestarted())
    assert world.detok.closed["lost"].finish_reason == "length"
    assert [replay.opening.request_id for replay in world.detok.replayed] == ["lost"]
    world.scheduler.step([], [])
    assert len(world.detok.drained) == 1


def test_a_request_that_a_frontend_sends_again_runs_unless_it_is_known() -> None:
    world = World(SchedulerArgs(max_batch_size=1, max_running_requests=1, max_queued_requests=2))
    requests = [submit(name, [5 + n], 6, ignore_eos=True) for n, name in enumerate("abcdef")]
    world.send(*requests[:2])
    world.send(*(msgspec.structs.replace(request, frontend_retry=True) for request in requests))
    replays = [(replay.opening.request_id, replay.token_ids) for replay in world.detok.replayed]
    assert replays == [(name, b"") for name in "cdef"], "their clients may have a part of them"
    world.detok.replayed.clear()
    world.run()
    world.send(*(msgspec.structs.replace(request, frontend_retry=True) for request in requests))
    world.run()
    for n, name in enumerate("abcdef"):
        assert tokens_of(world, name) == reference([5 + n], 6, True)
        assert world.detok.closed[name].finish_reason == "length", "the queue was not full"
    assert world.scheduler.info()["generation_tokens_total"] == 36
    assert not world.detok.replayed


def test_a_request_id_that_is_reused_does_not_get_the_end_of_the_earlier_request() -> None:
    world = World(SchedulerArgs())
    first = submit("a", [5], 3, ignore_eos=True)
    second = msgspec.structs.replace(submit("a", [6], 4, ignore_eos=True), received_at=1001.0)
    for message in (second, msgspec.structs.replace(second, frontend_retry=True)):
        world.send(msgspec.structs.replace(first, received_at=message.received_at - 1))
        world.run()
        world.detok.closed.clear()
        world.detok.tokens.clear()
        world.send(message)
        world.run()
        assert tokens_of(world, "a") == reference([6], 4, True)
        world.send(retried(second))
        replay = world.detok.replayed[-1]
        assert unpack_ids(replay.token_ids).tolist() == reference([6], 4, True)
        world.detok.replayed.clear()
        world.detok.closed.clear()


def test_an_unknown_request_that_is_sent_again_runs_after_an_empty_replay() -> None:
    world = World(SchedulerArgs())
    world.send(retried(submit("a", [5], 4, ignore_eos=True)))
    assert [unpack_ids(replay.token_ids).tolist() for replay in world.detok.replayed] == [[]]
    world.run()
    assert tokens_of(world, "a") == reference([5], 4, True)


def test_a_request_aborted_when_its_client_was_lost_runs_again_when_it_is_sent_again() -> None:
    world = World(SchedulerArgs())
    world.send(submit("a", [5], 4, ignore_eos=True))
    world.send(abort("a"))
    world.detok.closed.clear()
    world.send(retried(submit("a", [5], 4, ignore_eos=True)))
    world.run()
    assert tokens_of(world, "a") == reference([5], 4, True)
    assert world.detok.closed["a"].finish_reason == "length"


def test_a_request_that_only_claims_to_be_sent_again_meets_every_limit() -> None:
    world = World(SchedulerArgs(max_queued_requests=1, max_running_requests=1))
    world.send(submit("a", [5], 9, ignore_eos=True))
    for name in "bc":
        world.send(retried(submit(name, [6], 3, ignore_eos=True)))
    error = world.detok.closed["c"].error
    assert error is not None
    assert error.code == "queue_full"
    world = World(SchedulerArgs(max_requests_per_client=1))
    world.send(submit("a", [5], 9, ignore_eos=True))
    world.send(retried(submit("b", [6], 3)), retried(submit("c", [6], 3, client=b"d")))
    error = world.detok.closed["b"].error
    assert error is not None
    assert "--max-requests-per-client is 1" in error.message
    assert "c" not in world.detok.closed
    world.send(Drain(), retried(submit("e", [6], 3, client=b"e")))
    error = world.detok.closed["e"].error
    assert error is not None
    assert error.code == "server_stopping"


def test_a_request_that_was_refused_is_tried_again_when_it_is_sent_again() -> None:
    world = World(SchedulerArgs(max_queued_requests=1, max_running_requests=1))
    world.send(submit("a", [5], 9, ignore_eos=True))
    late = retried(submit("late", [7], 3, ignore_eos=True))
    world.send(submit("b", [6], 3, ignore_eos=True), late)
    assert world.detok.closed.pop("late").finish_reason == "error"
    world.run()
    world.send(late)
    world.run()
    assert world.detok.closed["late"].finish_reason == "length"
    assert tokens_of(world, "late") == reference([7], 3, True)


def test_replays_of_many_tokens_leave_in_pieces_between_the_steps_of_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(detok_outbox, "MAX_REPLAY_COST", 10)
    world = World(SchedulerArgs())
    prompts = {f"r{number}": [5, number + 3] for number in range(6)}
    for name, prompt in prompts.items():
        world.send(submit(name, prompt, 3 * len(name) + prompt[1], ignore_eos=True))
    for _ in range(8):
        world.step()
    world.kill_detok()
    world.restart_detok()
    assert len(world.detok.replayed) < len(prompts)
    world.run()
    assert {replay.opening.request_id for replay in world.detok.replayed} >= {"r5"}
    for name, prompt in prompts.items():
        assert world.detok.tokens[name] == reference(prompt, 3 * len(name) + prompt[1], True)
        assert name in world.detok.closed
    assert world.scheduler.lifecycle.outbox.all_acknowledged


def test_a_paused_scheduler_waits_for_a_worker_that_was_started_later() -> None:
    world = World(SchedulerArgs())
    world.send(submit("a", [5], 30, ignore_eos=True), submit("b", [6], 30, ignore_eos=True))
    for _ in range(3):
        world.step()
    world.scheduler.pause.begin(100)
    assert not world.scheduler.pause.is_complete, "a step is in flight"
    while world.step():
        pass
    assert world.scheduler.pause.is_complete
    num_tokens = len(tokens_of(world, "a"))
    assert 0 < num_tokens < 30
    assert world.scheduler.pause.num_new_tokens == 2 * (num_tokens + 1), "prompts have one token"
    world.send(submit("c", [7], 5, ignore_eos=True), abort("b"))
    for started_at in (99, 101):  # the old worker, which a new scheduler has reset, and a new one
        world.restart_worker(started_at)
        assert world.scheduler.pause.is_complete == (started_at < 100)
        assert world.scheduler.pause.num_new_tokens == 0
    world.run()
    for name, prompt, count in (("a", 5, 30), ("c", 7, 5)):
        assert tokens_of(world, name) == reference([prompt], count, True)
    assert all(request.worker_crashes == 0 for request in world.scheduler.lifecycle.table)


def test_a_request_that_waits_for_a_suspended_model_ends_at_its_deadline() -> None:
    world = World(SchedulerArgs())
    world.scheduler.pause.begin(100)
    message = submit("late", [5], 30, ignore_eos=True)
    world.send(msgspec.structs.replace(message, deadline=world.worker.now + 2.0))
    assert world.wake_at == world.worker.now + 2.0
    world.wake(world.worker.now + 3.0)
    assert world.detok.closed["late"].finish_reason == "error"
