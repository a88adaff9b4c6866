"""The frontend under load: what it refuses, with which hint, and what it keeps for a restart."""

import asyncio
from collections.abc import Iterable

import msgspec
import pytest

from http_proc.core.errors import from_server
from quadriga.errors import QueueFull
from quadriga.sampling.params import SamplingParams
from quadriga.wire.client import (
    MAX_PROGRESS_IDS,
    Abort,
    Accepted,
    GetInfo,
    GetProgress,
    Info,
    RefusalInfo,
    Refused,
    ServerGone,
    gateway_address,
)
from quadriga.wire.sockets import encode
from quadriga.wire.to_detok import Delivered
from quadriga.wire.to_scheduler import (
    CLIENT,
    CLIENT_LOST,
    AbortRequest,
    ChoiceProgress,
    Drain,
    EndsDelivered,
    ProgressRequest,
    Shutdown,
    Submit,
)
from tests.unit.tokenizer.frontend_world import SENDER, FrontendWorld
from tokenizer_proc.info import EXPIRY_S, MAX_PENDING_OF_CLIENT, InfoRequests
from tokenizer_proc.intake.overload import OverloadGuard


def test_past_the_queue_a_request_is_refused_before_it_is_tokenised_with_a_hint() -> None:
    world = FrontendWorld(max_queued=3)
    for name in "abcd":
        world.ask(name)
    assert world.submitted == ["a", "b", "c"]
    refused = world.port.last()
    assert isinstance(refused, Refused)
    assert (refused.request_id, refused.error.code) == ("d", "queue_full")
    assert "3 requests are waiting and --max-queued-requests is 3" in refused.error.message
    assert refused.error.retry_after == 1
    world.deliver(waiting=2)
    world.ask("e")
    world.ask("f")
    assert world.submitted == ["a", "b", "c", "e"]


def test_choices_count_as_they_wait() -> None:
    world = FrontendWorld(max_queued=3)
    world.ask("a", params=SamplingParams(n=2))
    world.ask("b", params=SamplingParams(n=2))
    world.ask("c")
    assert world.submitted == ["a", "c"]


def test_a_request_that_was_accepted_is_never_refused_when_it_is_sent_again() -> None:
    world = FrontendWorld(max_queued=1)
    world.ask("a")
    world.frontend.intake.drain()
    world.ask("a", resent=True)
    assert world.submitted == ["a", "a"]
    assert isinstance(world.scheduler.sent[1], Drain)
    assert world.scheduler.sent[2].client_retry


def test_the_end_of_a_lost_client_does_not_end_a_request_that_it_has_sent_again() -> None:
    world = FrontendWorld()
    world.ask("a")
    world.lose()
    world.ask("a", resent=True)
    num_sent = len(world.port.sent)
    world.deliver(ended=("a",), settled=(7,), lost=True)
    assert len(world.port.sent) == num_sent
    assert world.frontend.intake.num_open == 1
    assert world.scheduler.sent[-1] == EndsDelivered({7: 0}, 0, SENDER)
    world.deliver(ended=("a",))
    assert world.frontend.intake.num_open == 0


def test_a_request_is_acknowledged_each_time_before_the_scheduler_has_it() -> None:
    world = FrontendWorld()
    world.ask("a", acknowledge=True)
    assert world.port.last() == Accepted("a", 1)
    world.ask("a", acknowledge=True, resent=True)
    world.ask("b")
    assert len(world.port.sent) == 2


def test_a_frontend_ends_when_its_drain_is_complete_and_announces_it_to_every_client() -> None:
    world = FrontendWorld()
    world.ask("a")
    world.receive(b"", b"", b"")  # answers the Drain of a predecessor
    assert not world.frontend.ended.is_set()
    world.frontend.intake.drain()
    world.receive(b"", b"", b"")
    assert world.frontend.ended.is_set()
    assert [type(message) for message in world.scheduler.sent] == [Submit, Drain, Shutdown]
    last = world.port.last()
    assert isinstance(last, ServerGone) and last.error.code == "server_stopping"


def test_a_frontend_that_stops_takes_the_gateways_requests_until_it_has_left() -> None:
    world = FrontendWorld()
    gateway = gateway_address().bytes
    world.frontend.intake.drain(gateway_goes_on=True)
    world.ask("by a client")
    assert isinstance(world.port.last(), Refused)
    world.ask("of a call", client=gateway)
    assert world.submitted == ["of a call"]
    assert not world.frontend.intake.has_drained
    world.frontend.intake.drain()
    assert isinstance(world.scheduler.sent[-1], Drain)
    world.ask("too late", client=gateway)
    assert world.submitted == ["of a call"]


def test_another_scheduler_is_sent_what_has_not_ended_and_what_was_aborted() -> None:
    world = FrontendWorld(max_queued=100)
    world.ask("both", params=SamplingParams(n=2))
    for name in ("ended", "half", "aborted", "open"):
        world.ask(name, params=SamplingParams(n=1 + (name == "half")))
    world.ask("of another", client=b"d")
    world.deliver(ended=("half", "ended"), settled=(7, 8))
    assert world.scheduler.sent[-1] == EndsDelivered({7: 0, 8: 0}, 0, SENDER)
    world.frontend.on_public([b"c", encode(Abort(1, "aborted"))])
    world.frontend.intake.drain()
    before = world.scheduler.sent.copy()
    world.restart_scheduler()
    submits = {m.request_id: m for m in before if isinstance(m, Submit)}

    def again(name: str, indexes: Iterable[int] = (0,)) -> Submit:
        progress = [ChoiceProgress(index) for index in indexes]
        return msgspec.structs.replace(submits[name], frontend_retry=True, progress=progress)

    assert world.scheduler.sent == [
        again("both", (0, 1)),
        again("half", (1,)),
        again("aborted"),
        AbortRequest(b"c", "aborted", CLIENT, SENDER),
        again("open"),
        again("of another"),
        Drain(),
    ]
    world.deliver(ended=("both", "both", "half", "aborted", "open"))
    world.deliver(client=b"d", ended=("of another",))
    world.restart_scheduler()
    assert world.scheduler.sent == [Drain()]


def test_a_new_scheduler_ends_the_requests_of_a_lost_client_unless_it_has_come_back() -> None:
    world = FrontendWorld(max_queued=100)
    world.ask("a", params=SamplingParams(n=2))
    world.deliver(ended=("a",))
    world.ask("a", params=SamplingParams(n=2))  # it is under way: one choice is left of it
    world.deliver(ended=("a",))
    world.ask("b", client=b"gone")
    world.ask("c", client=b"back")
    world.port.missing |= {b"gone", b"back"}
    for client in (b"gone", b"back"):
        world.deliver(client=client)
    world.port.missing.clear()
    world.ask("c", client=b"back", resent=True)
    submit = world.scheduler.sent[-1]
    world.restart_scheduler()
    lost, abort, back = world.scheduler.sent
    assert (lost.client, lost.request_id) == (b"gone", "b")
    assert abort == AbortRequest(b"gone", "b", CLIENT_LOST, SENDER)
    assert back == msgspec.structs.replace(
        submit, frontend_retry=True, progress=[ChoiceProgress(0)]
    )


async def test_a_request_that_loses_its_client_in_encoding_is_dropped_and_may_be_resent() -> None:
    world = FrontendWorld(max_queued=100, limit=1)
    world.ask("a", late=True)
    world.ask("a", late=True)  # it is under way
    assert len(world.pool.begun) == 1
    world.lose()
    world.ask("a", late=True, resent=True)
    await world.pool.finish()
    assert world.scheduler.sent == [AbortRequest(b"c", "", CLIENT_LOST, SENDER)]
    await world.pool.finish()
    assert [type(message) for message in world.scheduler.sent] == [AbortRequest, Submit]
    world.deliver(ended=("a",))
    world.ask("b")
    assert world.submitted == ["a", "b"]


async def test_choices_in_preparation_count_as_they_wait() -> None:
    world = FrontendWorld(max_queued=2)
    world.ask("a", late=True)
    await asyncio.sleep(0)
    world.deliver(waiting=1)
    world.ask("b")
    assert world.refusal() == ("b", "queue_full")
    await world.pool.finish()
    world.deliver(waiting=1)
    world.ask("b")
    assert world.submitted == ["a", "b"]


async def test_a_request_whose_grammar_is_not_known_is_submitted_when_it_is_checked() -> None:
    world = FrontendWorld()
    params = SamplingParams(regex="a+")
    for name in "ab":
        world.ask(name, params=params)
    world.ask("lost", client=b"d", params=params)
    world.lose(b"d")
    assert world.submitted == []
    world.grammars.go.set()
    while len(world.submitted) < 2:
        await asyncio.sleep(0.001)
    world.ask("c", params=params)
    assert world.submitted == ["a", "b", "c"]
    assert world.frontend.intake.num_open == 3


async def test_a_request_whose_grammar_is_refused_is_answered_and_forgotten() -> None:
    world = FrontendWorld()
    world.ask("a", params=SamplingParams(regex="wrong"))
    world.frontend.intake.drain()
    world.grammars.go.set()
    while not world.port.sent:
        await asyncio.sleep(0.001)
    assert world.refusal() == ("a", "invalid_request")
    assert world.scheduler.sent == [Drain()]


async def test_a_request_sent_again_while_it_is_being_encoded_is_replayed() -> None:
    world = FrontendWorld()
    world.ask("a", late=True)
    world.ask("a", late=True, resent=True)  # over a new connection
    assert len(world.pool.begun) == 1
    await world.pool.finish()
    (submit,) = world.scheduler.sent
    assert submit.client_retry


async def test_a_request_aborted_while_it_is_being_encoded_is_aborted_afterwards() -> None:
    world = FrontendWorld()
    world.ask("a", late=True)
    world.frontend.on_public([b"c", encode(Abort(1, "a"))])
    world.frontend.intake.drain()
    await world.pool.finish()
    abort = AbortRequest(b"c", "a", CLIENT, SENDER)
    assert [type(message) for message in world.scheduler.sent] == [
        AbortRequest,
        Submit,
        AbortRequest,
        Drain,
    ]
    assert world.scheduler.sent[0] == world.scheduler.sent[2] == abort


async def test_an_end_does_not_take_away_what_is_sent_again_meanwhile() -> None:
    world = FrontendWorld()
    world.ask("a")
    world.ask("a", late=True, resent=True)
    world.deliver(ended=("a",))
    await world.pool.finish()
    submit = world.scheduler.sent[-1]
    assert submit.client_retry
    world.restart_scheduler()
    (again,) = world.scheduler.sent
    assert again == msgspec.structs.replace(
        submit, frontend_retry=True, progress=[ChoiceProgress(0)]
    )


def test_a_client_over_its_limit_is_refused_and_others_are_not() -> None:
    world = FrontendWorld(max_queued=100, limit=2)
    for name in "abc":
        world.ask(name)
    refused = world.port.last()
    assert isinstance(refused, Refused)
    assert "this client has 2 open requests" in refused.error.message
    world.ask("x", client=b"other")
    world.deliver(ended=("a",))
    world.ask("d")
    assert world.submitted == ["a", "b", "x", "d"]


def test_a_request_is_open_until_its_last_choice_has_ended() -> None:
    world = FrontendWorld(max_queued=100, limit=1)
    world.ask("a", params=SamplingParams(n=2))
    world.deliver(ended=("a",))
    world.ask("b")
    world.deliver(ended=("a",))
    world.ask("c")
    assert world.submitted == ["a", "c"]


def test_refused_and_lost_requests_are_not_counted() -> None:
    world = FrontendWorld(max_queued=100, limit=1)
    world.ask("a", params=SamplingParams(max_new_tokens=1000))  # over the context
    world.ask("b")
    world.lose()
    world.ask("d")
    assert world.submitted == ["b", "d"]


def test_a_client_of_an_earlier_frontend_may_still_come_back() -> None:
    world = FrontendWorld()
    world.port.missing.add(b"c")
    world.deliver()
    assert world.scheduler.sent == [], "nothing is aborted"


def test_the_hint_follows_how_fast_requests_end_and_reaches_the_web() -> None:
    now = 0.0
    guard = OverloadGuard(40, None, lambda: now)
    guard.update_queue(40, None)
    for _ in range(10):
        now += 0.5
        guard.count_ended(1)
    with pytest.raises(QueueFull) as caught:
        guard.check(num_choices=1, count_open=lambda: 0)
    assert caught.value.retry_after == 5  # a quarter of the queue, at about two a second
    error = RefusalInfo.of(caught.value).exception()
    assert isinstance(error, QueueFull)
    answer = from_server(error, {})
    hint = {"X-Queue-Position": "41", "X-Expected-Wait": "18.4"}
    assert (answer.status, answer.headers()) == (429, {"Retry-After": "5"} | hint)


def test_the_wait_that_the_scheduler_reports_decides_the_hint() -> None:
    guard = OverloadGuard(40, None, lambda: 0.0)
    guard.update_queue(40, 90.0)
    with pytest.raises(QueueFull) as caught:
        guard.check(num_choices=1, count_open=lambda: 0)
    error = caught.value
    assert (error.queue_position, error.expected_wait, error.retry_after) == (41, 90.0, 23)
    guard.update_queue(40, None)
    with pytest.raises(QueueFull) as caught:
        guard.check(num_choices=1, count_open=lambda: 0)
    error = caught.value
    assert (error.queue_position, error.expected_wait, error.retry_after) == (41, None, 1)


# --- what a client sends again --------------------------------------------------------------------


def test_a_request_that_only_claims_to_be_sent_again_meets_every_limit() -> None:
    world = FrontendWorld(max_queued=1)
    world.ask("a", resent=True)
    for late in (False, True):
        world.ask("b", late=late, resent=True)
        assert world.refusal() == ("b", "queue_full")
    world.frontend.intake.drain()
    for late in (False, True):
        world.ask("c", late=late, resent=True)
        assert world.refusal() == ("c", "server_stopping")
    assert world.submitted == ["a"]


def test_a_request_whose_connection_was_lost_may_be_sent_again_past_the_limits() -> None:
    world = FrontendWorld(max_queued=1)
    world.ask("a")
    world.lose()
    world.frontend.intake.drain()
    world.ask("a", resent=True)
    world.ask("b", resent=True)
    assert world.submitted == ["a", "a"]
    assert world.refusal() == ("b", "server_stopping")


def test_a_frontend_that_replaces_another_leaves_what_is_sent_again_to_the_scheduler() -> None:
    world = FrontendWorld(max_queued=1, limit=1, replaces=True)
    for name in "ab":
        world.ask(name, resent=True)
    assert world.submitted == [], "it has not said yet which requests it has"
    world.restate()
    world.ask("c")
    assert world.submitted == ["a", "b"]
    assert world.refusal() == ("c", "queue_full")


async def test_requests_unprepared_at_the_end_of_a_stop_are_refused_and_the_stop_goes_on() -> None:
    world = FrontendWorld()
    world.ask("a", late=True)
    world.frontend.intake.drain()
    assert world.scheduler.sent == []
    world.frontend.intake.abort_incoming("the server stopped")
    assert world.refusal() == ("a", "server_stopping")
    assert world.scheduler.sent == [Drain()]
    await world.pool.finish()
    assert world.submitted == []


def test_questions_that_travel_the_ring_are_bounded_for_each_client() -> None:
    world = FrontendWorld()
    question = encode(GetInfo(1, "i"))
    for _ in range(MAX_PENDING_OF_CLIENT + 1):
        world.frontend.on_public([b"c", question])
    assert world.refusal() == ("i", "queue_full")
    world.frontend.on_public([b"d", question])
    assert len(world.scheduler.sent) == MAX_PENDING_OF_CLIENT + 1
    answer = encode(Delivered(inspected=True))
    world.receive(b"c", encode(Info("i", {})), answer)
    world.frontend.on_public([b"c", question])
    assert len(world.scheduler.sent) == MAX_PENDING_OF_CLIENT + 2


async def test_the_progress_of_a_bounded_number_of_requests_is_asked_of_the_scheduler() -> None:
    world = FrontendWorld()
    world.ask("late", late=True)
    world.ask("soon")
    world.frontend.on_public([b"c", encode(GetProgress(1, "q", ["soon", "late"]))])
    assert world.scheduler.sent[-1] == ProgressRequest(b"c", "q", ["soon", "late"], ["late"])
    too_many = ["x"] * (MAX_PROGRESS_IDS + 1)
    world.frontend.on_public([b"c", encode(GetProgress(1, "q", too_many))])
    assert world.refusal() == ("q", "invalid_request")


def test_a_question_that_is_never_answered_counts_for_some_seconds() -> None:
    now = 0.0
    inspections = InfoRequests(lambda: now)
    for _ in range(MAX_PENDING_OF_CLIENT):
        inspections.begin(b"c")
    with pytest.raises(QueueFull, match="of this client are not answered"):
        inspections.begin(b"c")
    now = EXPIRY_S
    inspections.begin(b"c")
