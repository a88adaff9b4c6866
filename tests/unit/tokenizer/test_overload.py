"""What the front door refuses because there is too much to do: at once, and with a hint."""

import asyncio
from array import array
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from http_proc.protocol.errors import from_ring
from quadriga.config.server_config import FrontendArgs
from quadriga.errors import QueueFull
from quadriga.sampling.params import SamplingParams
from quadriga.wire.messages.arrays import pack_ids
from quadriga.wire.messages.public import (
    Abort,
    ErrorInfo,
    Generate,
    GetInfo,
    Info,
    Refused,
    SentChunks,
    ServerGone,
    ServerMessage,
)
from quadriga.wire.messages.to_detok import Delivered
from quadriga.wire.messages.to_scheduler import (
    CLIENT,
    CLIENT_LOST,
    AbortRequest,
    Drain,
    EndsDelivered,
    Shutdown,
    Submit,
)
from quadriga.wire.sockets import Unreachable, encode
from tests.unit.tokenizer.test_validation import Recorder, make_front_door, model
from tokenizer_proc.info_requests import EXPIRY_S, MAX_OF_CLIENT, InfoRequests
from tokenizer_proc.overload import OverloadGuard
from tokenizer_proc.preparation.prepare import MAX_INLINE_BYTES, Preparer


class Port(Recorder):
    """Where the front door's answers go. missing: clients that cannot be reached."""

    def __init__(self) -> None:
        super().__init__()
        self.missing: set[bytes] = set()

    def send(self, *message: Any) -> bool:
        if message[0] in self.missing:
            raise Unreachable
        return super().send(*message)

    def last(self) -> ServerMessage:
        message: ServerMessage = msgspec.msgpack.decode(self.sent[-1], type=ServerMessage)
        return message


class LatePool:
    """Prepares long messages when the test says so. begun: frames, in order."""

    def __init__(self, preparer: Preparer) -> None:
        self._preparer = preparer
        self.begun: list[tuple[bytes, bytes, Callable[[bytes], None]]] = []

    def submit(self, client: bytes, frame: bytes, then: Callable[[bytes], None]) -> None:
        self.begun.append((client, frame, then))

    def drop(self, client: bytes) -> None:
        """Those of a client that is lost are being prepared, and go on."""

    def finish(self) -> None:
        """The oldest of them."""
        _, frame, then = self.begun.pop(0)
        then(self._preparer.prepare_frame(frame))


class OneTokenEncoder:
    """Encodes every text as one token."""

    def encode(self, prompt: object, chat: object) -> "array[int]":
        return array("i", [1])


class Door:
    """A front door without sockets. limit: of the open requests of one client."""

    def __init__(
        self, max_queued: int = 4, limit: int | None = None, replaces: bool = False
    ) -> None:
        self.scheduler, self.port = Recorder(), Port()
        args = FrontendArgs()
        self.pool = LatePool(Preparer(args, model(), OneTokenEncoder()))  # type: ignore[arg-type]
        load = OverloadGuard(max_queued, limit)
        self.door = make_front_door(self.scheduler, args, load, self.pool, replaces)
        self.door.clients.open(self.port)  # type: ignore[arg-type]

    def ask(self, name: str, client: bytes = b"c", late: bool = False, **fields: Any) -> None:
        """late: with a text that is too long to be encoded at once."""
        ids = None if late else pack_ids([1])
        text = "text " * MAX_INLINE_BYTES if late else ""
        message = Generate(1, name, text, prompt_token_ids=ids, **fields)
        self.door.on_public([client, encode(message)])

    def refusal(self) -> tuple[str, str]:
        """Of the last answer: whose request was refused, and the error's code."""
        refused = self.port.last()
        assert isinstance(refused, Refused)
        return refused.request_id, refused.error.code

    def lose(self, client: bytes = b"c") -> None:
        """Its connection is lost, and it may come back."""
        self.port.missing.add(client)
        self.hear(client)
        self.port.missing.clear()

    def hear(
        self,
        client: bytes = b"c",
        ended: tuple[str, ...] = (),
        waiting: int = 0,
        settled: tuple[int, ...] = (),
    ) -> None:
        told = encode(Delivered(list(ended), waiting, list(settled)))
        self.door.on_delivery([client, encode(SentChunks([])), told])

    @property
    def submitted(self) -> list[str]:
        return [m.request_id for m in self.scheduler.sent if isinstance(m, Submit)]


def test_past_the_queue_a_request_is_refused_before_it_is_tokenised_with_a_hint() -> None:
    door = Door(max_queued=3)
    for name in "abcd":
        door.ask(name)
    assert door.submitted == ["a", "b", "c"]
    refused = door.port.last()
    assert isinstance(refused, Refused)
    assert (refused.request_id, refused.error.code) == ("d", "queue_full")
    assert "3 requests are waiting and --max-queued-requests is 3" in refused.error.message
    assert refused.error.retry_after == 1
    door.hear(waiting=2)
    door.ask("e")
    door.ask("f")
    assert door.submitted == ["a", "b", "c", "e"]


def test_choices_count_as_they_wait() -> None:
    door = Door(max_queued=3)
    door.ask("a", params=SamplingParams(n=2))
    door.ask("b", params=SamplingParams(n=2))
    door.ask("c")
    assert door.submitted == ["a", "c"]


def test_a_request_that_was_accepted_is_never_refused_when_it_is_sent_again() -> None:
    door = Door(max_queued=1)
    door.ask("a")
    door.door.intake.drain()
    door.ask("a", resent=True)
    assert door.submitted == ["a", "a"]
    assert isinstance(door.scheduler.sent[1], Drain)
    assert door.scheduler.sent[2].resent


def test_a_front_door_leaves_when_all_is_told_on_its_own_demand() -> None:
    door = Door()
    door.door.on_delivery([b"", b"", b""])  # the answer to one that died
    assert not door.door.ended.is_set()
    door.door.intake.drain()
    door.door.on_delivery([b"", b"", b""])
    assert door.door.ended.is_set()
    assert [type(message) for message in door.scheduler.sent] == [Drain, Shutdown]


def test_another_scheduler_is_sent_what_has_not_ended_and_what_was_aborted() -> None:
    door = Door(max_queued=100)
    door.ask("both", params=SamplingParams(n=2))
    for name in ("ended", "half", "aborted", "open"):
        door.ask(name, params=SamplingParams(n=1 + (name == "half")))
    door.ask("of another", client=b"d")
    door.hear(ended=("half", "ended"), settled=(7, 8))
    assert door.scheduler.sent[-1] == EndsDelivered([7, 8])
    door.door.on_public([b"c", encode(Abort(1, "aborted"))])
    door.door.intake.drain()
    before = door.scheduler.sent.copy()
    door.door.intake.scheduler_was_replaced()
    submits = {m.request_id: m for m in before if isinstance(m, Submit)}
    assert door.scheduler.sent == [
        *(msgspec.structs.replace(submits[n], again=True) for n in ("both", "half", "aborted")),
        AbortRequest(b"c", "aborted", CLIENT),
        *(msgspec.structs.replace(submits[n], again=True) for n in ("open", "of another")),
        Drain(),
    ]
    door.hear(ended=("both", "both", "half", "aborted", "open"))
    door.hear(client=b"d", ended=("of another",))
    door.door.intake.scheduler_was_replaced()
    assert door.scheduler.sent == [Drain()]


def test_nothing_is_kept_of_a_client_that_is_gone_but_that_it_is() -> None:
    door = Door(max_queued=100)
    door.ask("a", params=SamplingParams(n=2))
    door.hear(ended=("a",))
    door.ask("a", params=SamplingParams(n=2))  # it is under way: one choice is left of it
    door.hear(ended=("a",))
    door.ask("b", client=b"gone")
    door.ask("c", client=b"back")
    door.port.missing |= {b"gone", b"back"}
    for client in (b"gone", b"back"):
        door.hear(client=client)
    door.port.missing.clear()
    door.ask("c", client=b"back", resent=True)
    submit = door.scheduler.sent[-1]
    door.door.intake.scheduler_was_replaced()
    assert door.scheduler.sent == [
        AbortRequest(b"gone", "", CLIENT_LOST),
        msgspec.structs.replace(submit, again=True),
    ]


def test_what_is_being_encoded_when_its_client_is_lost_is_not_run_and_can_be_sent_again() -> None:
    door = Door(max_queued=100, limit=1)
    door.ask("a", late=True)
    door.ask("a", late=True)  # it is under way
    assert len(door.pool.begun) == 1
    door.lose()
    door.ask("a", late=True, resent=True)
    door.pool.finish()
    assert door.scheduler.sent == [AbortRequest(b"c", "", CLIENT_LOST)]
    door.pool.finish()
    assert [type(message) for message in door.scheduler.sent] == [AbortRequest, Submit]
    door.hear(ended=("a",))
    door.ask("b")
    assert door.submitted == ["a", "b"]


def test_what_is_sent_again_while_it_is_being_encoded_is_told_anew() -> None:
    door = Door()
    door.ask("a", late=True)
    door.ask("a", late=True, resent=True)  # over a new connection, faster than anybody noticed
    assert len(door.pool.begun) == 1
    door.pool.finish()
    (submit,) = door.scheduler.sent
    assert submit.resent


def test_what_is_aborted_while_it_is_being_encoded_is_aborted_when_it_is_known() -> None:
    door = Door()
    door.ask("a", late=True)
    door.door.on_public([b"c", encode(Abort(1, "a"))])
    door.door.intake.drain()
    door.pool.finish()
    abort = AbortRequest(b"c", "a", CLIENT)
    assert [type(message) for message in door.scheduler.sent] == [
        AbortRequest,
        Submit,
        AbortRequest,
        Drain,
    ]
    assert door.scheduler.sent[0] == door.scheduler.sent[2] == abort


def test_an_end_does_not_take_away_what_is_sent_again_meanwhile() -> None:
    door = Door()
    door.ask("a")
    door.ask("a", late=True, resent=True)
    door.hear(ended=("a",))
    door.pool.finish()
    submit = door.scheduler.sent[-1]
    assert submit.resent
    door.door.intake.scheduler_was_replaced()
    assert door.scheduler.sent == [msgspec.structs.replace(submit, again=True)]


def test_a_client_over_its_limit_is_refused_and_others_are_not() -> None:
    door = Door(max_queued=100, limit=2)
    for name in "abc":
        door.ask(name)
    refused = door.port.last()
    assert isinstance(refused, Refused)
    assert "this client has 2 open requests" in refused.error.message
    door.ask("x", client=b"other")
    door.hear(ended=("a",))
    door.ask("d")
    assert door.submitted == ["a", "b", "x", "d"]


def test_a_request_is_open_until_its_last_choice_has_ended() -> None:
    door = Door(max_queued=100, limit=1)
    door.ask("a", params=SamplingParams(n=2))
    door.hear(ended=("a",))
    door.ask("b")
    door.hear(ended=("a",))
    door.ask("c")
    assert door.submitted == ["a", "c"]


def test_refused_and_lost_requests_are_not_counted() -> None:
    door = Door(max_queued=100, limit=1)
    door.ask("a", params=SamplingParams(max_new_tokens=1000))  # over the context
    door.ask("b")
    door.lose()
    door.ask("d")
    assert door.submitted == ["b", "d"]


def test_a_client_of_an_earlier_front_door_may_still_come_back() -> None:
    door = Door()
    door.port.missing.add(b"c")
    door.hear()
    assert door.scheduler.sent == [], "nothing is aborted"


def test_the_hint_follows_how_fast_requests_end_and_reaches_the_web() -> None:
    now = 0.0
    load = OverloadGuard(40, None, lambda: now)
    load.report(40)
    for _ in range(10):
        now += 0.5
        load.ended(1)
    with pytest.raises(QueueFull) as caught:
        load.check(0, 1)
    assert caught.value.retry_after == 5  # a quarter of the queue, at about two a second
    error = ErrorInfo.of(caught.value).exception()
    assert isinstance(error, QueueFull)
    assert error.retry_after == 5
    answer = from_ring(error, {})
    assert (answer.status, answer.headers()) == (429, {"Retry-After": "5"})


def test_the_end_is_told_to_every_client() -> None:
    async def run() -> None:
        door = Door()
        door.ask("a")
        door.door.intake.drain()
        door.door.on_delivery([b"", b"", b""])
        last = door.port.last()
        assert isinstance(last, ServerGone)
        assert last.error.code == "server_stopping"
        assert door.door.ended.is_set()

    asyncio.run(run())


# --- what a client sends again --------------------------------------------------------------------


def test_a_request_that_only_claims_to_be_sent_again_meets_every_limit() -> None:
    door = Door(max_queued=1)
    door.ask("a", resent=True)
    for late in (False, True):
        door.ask("b", late=late, resent=True)
        assert door.refusal() == ("b", "queue_full")
    door.door.intake.drain()
    for late in (False, True):
        door.ask("c", late=late, resent=True)
        assert door.refusal() == ("c", "server_stopping")
    assert door.submitted == ["a"]


def test_a_request_whose_connection_was_lost_may_be_sent_again_past_the_limits() -> None:
    door = Door(max_queued=1)
    door.ask("a")
    door.lose()
    door.door.intake.drain()
    door.ask("a", resent=True)
    door.ask("b", resent=True)
    assert door.submitted == ["a", "a"]
    assert door.refusal() == ("b", "server_stopping")


def test_a_front_door_that_replaces_another_leaves_what_is_sent_again_to_the_scheduler() -> None:
    door = Door(max_queued=1, limit=1, replaces=True)
    for name in "ab":
        door.ask(name, resent=True)
    door.ask("c")
    assert door.submitted == ["a", "b"]
    assert door.refusal() == ("c", "queue_full")


def test_what_waits_to_be_prepared_at_the_end_of_a_stop_is_refused_and_the_stop_goes_on() -> None:
    door = Door()
    door.ask("a", late=True)
    door.door.intake.drain()
    assert door.scheduler.sent == []
    door.door.intake.abort_incoming("the server stopped")
    assert door.refusal() == ("a", "server_stopping")
    assert door.scheduler.sent == [Drain()]
    door.pool.finish()
    assert door.submitted == []


def test_questions_that_travel_the_ring_are_bounded_for_each_client() -> None:
    door = Door()
    question = encode(GetInfo(1, "i"))
    for _ in range(MAX_OF_CLIENT + 1):
        door.door.on_public([b"c", question])
    assert door.refusal() == ("i", "queue_full")
    door.door.on_public([b"d", question])
    assert len(door.scheduler.sent) == MAX_OF_CLIENT + 1
    answer = encode(Delivered(inspected=True))
    door.door.on_delivery([b"c", encode(Info("i", {})), answer])
    door.door.on_public([b"c", question])
    assert len(door.scheduler.sent) == MAX_OF_CLIENT + 2


def test_a_question_that_is_never_answered_counts_for_some_seconds() -> None:
    now = 0.0
    inspections = InfoRequests(lambda: now)
    for _ in range(MAX_OF_CLIENT):
        inspections.begin(b"c")
    with pytest.raises(QueueFull, match="of this client are not answered"):
        inspections.begin(b"c")
    now = EXPIRY_S
    inspections.begin(b"c")
