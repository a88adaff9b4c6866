"""A request that moves to another scheduler goes on from its tokens, and is journaled with them."""

from pathlib import Path

import msgspec
import pytest

from quadriga.server.config.engine_args import SchedulerArgs
from quadriga.wire.packing import pack_ids
from quadriga.wire.to_detok import HandedBack, StepOutput
from quadriga.wire.to_scheduler import ChoiceProgress, DetokReady, FrontendRestarted, Recall, Submit
from scheduler_proc.journal.events import StepEvents
from scheduler_proc.journal.recovery import restored
from scheduler_proc.observe.replica_report import ReplicaReport
from scheduler_proc.state.request import FinishReason
from tests.unit.journal_runs import Run, outline, release_journal
from tests.unit.simulation import World, reference, submit

PROMPT = [5, 6, 7]


def moved(message: Submit, *progress: ChoiceProgress, num_losses: int = 1) -> Submit:
    return msgspec.structs.replace(
        message, frontend_retry=True, progress=list(progress), num_losses=num_losses
    )


def known(tokens: list[int], index: int = 0) -> ChoiceProgress:
    return ChoiceProgress(index, pack_ids(tokens), 3.0)


@pytest.mark.parametrize("num_known", [0, 1, 5, 11])
def test_it_goes_on_from_the_tokens_that_its_client_has(num_known: int) -> None:
    world, expected = World(SchedulerArgs()), reference(PROMPT, 12, True)
    message = submit("a", PROMPT, 12, ignore_eos=True)
    world.send(moved(message, known(expected[:num_known])))
    world.run()
    assert world.detok.tokens["a"] == expected
    assert world.detok.closed["a"].finish_reason == "length"
    assert world.scheduler.info()["pages_held"] == 0


def test_its_next_token_comes_before_prompts_under_way() -> None:
    world = World(SchedulerArgs(itl_target=1.0), 1024)  # a step has room for 16 tokens
    world.send(submit("before", [7] * 80, 1))
    world.run()
    world.send(*(submit(f"r{number}", [9 - number] * 200, 4) for number in range(3)))
    for _ in range(6):
        world.step()
    world.send(moved(submit("a", PROMPT, 3, ignore_eos=True), known(reference(PROMPT, 1, True))))
    for _ in range(3):  # two are planned already
        world.step()
    assert len(world.detok.tokens["a"]) >= 2
    world.run()
    assert world.detok.tokens["a"] == reference(PROMPT, 3, True)


@pytest.mark.parametrize(
    ("message", "tokens", "reason", "matched"),
    [
        (submit("a", PROMPT, 3, ignore_eos=True), reference(PROMPT, 3, True), "length", None),
        (submit("a", PROMPT, 9, stop_token_ids=[77]), [70, 77], "stop", 77),
    ],
)
def test_one_that_has_all_of_its_tokens_ends_at_once(
    message: Submit, tokens: list[int], reason: str, matched: int | None
) -> None:
    world = World(SchedulerArgs())
    world.send(moved(message, known(tokens)))
    world.run()
    assert world.detok.tokens["a"] == tokens
    closed = world.detok.closed["a"]
    assert (closed.finish_reason, closed.matched_stop) == (reason, matched)
    assert world.scheduler.info()["steps"] == 0


def test_only_the_choices_that_go_on_run() -> None:
    world = World(SchedulerArgs())
    message = submit("a", PROMPT, 6, ignore_eos=True)
    message = msgspec.structs.replace(message, params=msgspec.structs.replace(message.params, n=3))
    world.send(moved(message, ChoiceProgress(2)))
    world.run()
    assert [replay.opening.index for replay in world.detok.replayed] == [2]
    assert world.scheduler.info()["ended"]["length"] == 1


def test_a_scheduler_takes_a_moved_request_once() -> None:
    world = World(SchedulerArgs())
    message = moved(submit("a", PROMPT, 12, ignore_eos=True), known([]))
    world.send(message, message)
    world.run()
    assert world.detok.tokens["a"] == reference(PROMPT, 12, True)


def test_a_later_stay_of_one_choice_leaves_the_others() -> None:
    world = World(SchedulerArgs())
    message = submit("a", PROMPT, 6, ignore_eos=True)
    message = msgspec.structs.replace(message, params=msgspec.structs.replace(message.params, n=2))
    for index, since in [(1, 8), (0, 9)]:
        world.send(
            msgspec.structs.replace(moved(message, known([], index)), placement=since, since=since)
        )
    assert [request.index for request in world.scheduler.lifecycle.table] == [1, 0]


def test_one_that_was_at_two_lost_replicas_runs_alone() -> None:
    world = World(SchedulerArgs())
    message = submit("a", PROMPT, 12, ignore_eos=True)
    world.send(moved(message, known([]), num_losses=2), submit("b", [9], 12, ignore_eos=True))
    world.step()
    assert len(world.scheduler.lifecycle.core.quarantine) == 1
    world.run()
    assert world.detok.tokens["a"] == reference(PROMPT, 12, True)


def test_its_journal_has_its_tokens_once(tmp_path: Path) -> None:
    run = Run(tmp_path)
    message = moved(run_message(), known([11, 12], 1))
    (request,) = run.requests.add(message)
    run.journal.append(StepEvents(accepted=[(message, [request])]))
    run.generate(request, 13)
    run.journal.commit()
    expected = [("m", 1, [11, 12, 13], False, False)]
    assert outline(run.recovered()) == expected
    run.journal.compact()
    assert outline(run.recovered()) == expected
    release_journal(run.journal)


def test_its_journal_has_its_given_tokens_once(tmp_path: Path) -> None:
    run = Run(tmp_path)
    message = run_message()
    params = msgspec.structs.replace(message.params, first_token_ids=[9, 10])
    message = msgspec.structs.replace(message, params=params)
    begun, untouched = run.requests.add(message)
    run.journal.append(StepEvents(accepted=[(message, [begun, untouched])]))
    run.generate(begun, 11)
    run.journal.commit()
    for _ in range(2):
        recovered = run.recovered()
        assert outline(recovered) == [
            ("m", 0, [9, 10, 11], False, False),
            ("m", 1, [9, 10], False, False),
        ]
        requests = [restored(each, frozenset()) for each in recovered]
        assert [request.generated.tolist() for request in requests] == [[9, 10, 11], [9, 10]]
        assert [request.published.tolist() for request in requests] == [[9, 10, 11], []]
        assert {request.num_prompt for request in requests} == {2}
        run.journal.compact()
    release_journal(run.journal)


@pytest.mark.parametrize("num_known", [0, 3, 5])
def test_a_moved_one_has_its_given_tokens_once(num_known: int) -> None:
    first_ids = [40, 41, 42]
    expected = first_ids + reference(PROMPT + first_ids, 9, True)
    world = World(SchedulerArgs())
    message = submit("a", PROMPT, 12, ignore_eos=True, first_token_ids=first_ids)
    world.send(moved(message, known(expected[:num_known])))
    world.run()
    assert world.detok.tokens["a"] == expected


def test_given_tokens_are_computed_once_and_cached_for_the_next_choice() -> None:
    first_ids = list(range(40, 60))
    world = World(SchedulerArgs(), page_size=4)
    message = submit("a", PROMPT, 24, ignore_eos=True, first_token_ids=first_ids)
    world.send(message)
    world.run()
    num_tokens = sum(map(sum, world.worker.tokens_of_steps))
    world.send(msgspec.structs.replace(message, request_id="b"))
    world.run()
    # 26 of the 27 tokens before the last sampled one are in full pages.
    assert sum(map(sum, world.worker.tokens_of_steps)) - num_tokens <= 3 + 4
    assert world.detok.tokens["a"] == world.detok.tokens["b"]
    assert world.detok.closed["b"].cached_tokens == len(PROMPT)


def test_64_forks_at_token_4000_share_their_pages() -> None:
    args = SchedulerArgs(max_running_requests=64, max_batch_size=64, prefill_max_batch_size=64)
    world = World(args, num_pages=1024, page_size=16, prefill_tokens=8192)
    world.checked = False  # of so many pages, after each step, it takes long
    prompt, first_ids = list(range(3, 15)), [3 + 7 * place % 90 for place in range(4000)]

    def fork(name: str) -> Submit:
        return submit(name, prompt, 4016, ignore_eos=True, first_token_ids=first_ids)

    world.send(fork("stream"))
    world.run()
    num_before = sum(map(sum, world.worker.tokens_of_steps))
    world.send(*(fork(f"fork {number}") for number in range(64)))
    max_held = 0
    while world.step():
        max_held = max(max_held, world.scheduler.lifecycle.core.kv.num_held)
    # 4,012 tokens are 250 full pages and 12 tokens; each fork has two pages of its own.
    assert max_held == 250 + 64 * 2
    assert sum(map(sum, world.worker.tokens_of_steps)) - num_before == 64 * (12 + 15)
    world.scheduler.check()


def run_message() -> Submit:
    message = submit("m", [7, 8], 20)
    return msgspec.structs.replace(
        message, params=msgspec.structs.replace(message.params, n=2, seed=1)
    )


def test_a_replica_reports_what_it_holds_to_a_new_frontend_and_to_a_new_detokenizer() -> None:
    seen: list[msgspec.Struct] = []
    world = World(SchedulerArgs(), observe=lambda _link, message: seen.append(message))
    world.scheduler.lifecycle.report = ReplicaReport(notes_steps=True)
    world.send(submit("a", PROMPT, 12, ignore_eos=True), submit("ended", [9], 1))
    for _ in range(6):
        world.step()
    for message in (FrontendRestarted(), DetokReady(world.detok.session)):
        seen.clear()
        world.send(message)
        world.step()
        news = [m.news for m in seen if isinstance(m, StepOutput) and m.news is not None]
        (restated,) = [one for one in news if one.restates]
        assert [(held.request_id, held.index) for held in restated.held] == [("a", 0)]
        assert len(restated.held[0].token_ids) > 0
        assert [ended.request_id for ended in restated.ended] == ["ended"]
    world.run()


def test_a_recalled_request_is_gone_without_an_end_and_goes_on_elsewhere() -> None:
    seen: list[msgspec.Struct] = []
    world = World(SchedulerArgs(), observe=lambda _link, message: seen.append(message))
    message, expected = submit("a", PROMPT, 12, ignore_eos=True), reference(PROMPT, 12, True)
    world.send(message, submit("waits", [8], 12), submit("ended", [9], 1))
    for _ in range(4):
        world.step()
    world.send(Recall(7))
    (answer,) = [message for message in seen if isinstance(message, HandedBack)]
    assert (answer.number, len(answer.seqs)) == (7, 2)
    tokens = list(world.detok.tokens["a"])
    assert 0 < len(tokens) < 12
    world.run()
    assert world.detok.closed.keys() == {"ended"}
    assert world.detok.tokens["a"] == tokens
    assert world.scheduler.info()["pages_held"] == 0
    assert world.scheduler.info()["ended"]["abort"] == 0
    other = World(SchedulerArgs())
    other.send(moved(message, known(tokens), num_losses=0))
    other.run()
    assert other.detok.tokens["a"] == expected


def test_a_recalled_request_may_come_back() -> None:
    world, expected = World(SchedulerArgs()), reference(PROMPT, 12, True)
    message = submit("a", PROMPT, 12, ignore_eos=True)
    world.send(message)
    for _ in range(4):
        world.step()
    tokens = list(world.detok.tokens["a"])
    world.send(Recall(1), moved(message, known(tokens), num_losses=0))
    world.run()
    assert world.detok.tokens["a"] == expected


def test_a_recalled_request_is_not_resumed_from_the_journal(tmp_path: Path) -> None:
    run = Run(tmp_path)
    message = run_message()
    requests = run.requests.add(message)
    run.journal.append(StepEvents(accepted=[(message, requests)]))
    for request in requests:
        request.finish(FinishReason.ABORT)
    seqs = [request.seq for request in requests]
    run.journal.append(StepEvents(finished=requests, acknowledged=seqs))
    run.journal.commit()
    assert [line[-2:] for line in outline(run.recovered())] == [(True, True)] * 2
    release_journal(run.journal)
