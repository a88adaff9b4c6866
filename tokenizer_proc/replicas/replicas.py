"""The replicas of a server, one or more: one scheduler to send to, and one source of results.

`Questions` makes one answer of theirs, `Dispatch` sends requests to the schedulers, and `Replicas`
passes on what these deliver.
"""

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import msgspec

from quadriga import __version__, errors
from quadriga.wire.adapter import AdapterRef
from quadriga.wire.client import (
    Chunks,
    Info,
    InfoValues,
    ProgressAnswer,
    Replay,
    RequestProgress,
    RequestState,
    encode_chunks,
)
from quadriga.wire.sockets import Outbox, encode
from quadriga.wire.to_detok import (
    Delivered,
    HandedBack,
    KnownRequests,
    StepNews,
    StoredPrompt,
    Withdrawn,
)
from quadriga.wire.to_scheduler import (
    CLIENT_LOST,
    AbortRequest,
    Drain,
    EndsDelivered,
    FrontendRestarted,
    InfoRequest,
    LinkRestored,
    PinAdapters,
    ProgressRequest,
    Recall,
    Submit,
    WatchSteps,
    Withdraw,
)
from quadriga.wire.trace import RequestTrace, note_replica
from tokenizer_proc.replicas.open_requests import EndKind, OpenRequests
from tokenizer_proc.replicas.placed import ChoiceOwner, Name, PlacedRequest, RouterKey
from tokenizer_proc.replicas.replica_set import ReplicaSet, ReplicaState
from tokenizer_proc.replicas.router import Router

# Questions to all replicas: an answer is made of theirs once the last one has come.

# Values that are the same for all, or of which the largest says most; all other numbers are added.
LARGEST = frozenset(
    {
        "page_size", "chunked_prefill_size", "new_token_ratio", "step_gap_ms_p50",
        "step_gap_ms_p99", "adapters.max", "adapters.max_in_memory",
    }
)  # fmt: skip
JOURNAL_FAILED = "failed"


def merged_info(
    asked: InfoValues, infos: Mapping[int, InfoValues], lists_replicas: bool
) -> InfoValues:
    """Return the info of a server.

    Args:
        asked: what the frontend has put into the question, which is in each answer.
        infos: the answers by the numbers of the replicas, at least one.
        lists_replicas: add the values of each, and its number to the names of its processes.
            Without, the only answer is that of the server.
    """
    if not lists_replicas:
        return next(iter(infos.values()))
    own = {
        number: {name: value for name, value in values.items() if name not in asked}
        for number, values in infos.items()
    }
    merged: InfoValues = dict(asked)
    for name in dict.fromkeys(name for values in own.values() for name in values):
        merged[name] = _merged(name, [values[name] for values in own.values() if name in values])
    merged["pids"] = _pids(asked, infos)
    merged["replicas"] = [{"replica": number, **own[number]} for number in sorted(own)]
    return merged


def _merged(name: str, values: Sequence[Any]) -> Any:
    first = values[0]
    if name == "ready":
        return any(values)
    if name == "journal":
        return JOURNAL_FAILED if JOURNAL_FAILED in values else first
    if name in LARGEST:
        return max((value for value in values if value is not None), default=None)
    return _added(name, values)


def _added(name: str, values: Sequence[Any]) -> Any:
    """Return what replicas have together.

    That is the sum of numbers, of the items of maps, and of the numbers in lists by their places;
    the different ones of the names in lists; of anything else the first.
    """
    first = values[0]
    if isinstance(first, dict):
        keys = dict.fromkeys(key for value in values for key in value)
        return {key: _merged(f"{name}.{key}", [v[key] for v in values if key in v]) for key in keys}
    if isinstance(first, list):
        if any(isinstance(item, str) for value in values for item in value):
            return list(dict.fromkeys(item for value in values for item in value))
        return [_added(name, items) for items in zip(*values, strict=True)]
    if isinstance(first, (int, float)) and not isinstance(first, bool):
        return sum(values)
    return next((value for value in values if value is not None), None)


def _pids(asked: InfoValues, infos: Mapping[int, InfoValues]) -> dict[str, int]:
    """Return the pids of all processes; those of a replica are called as in the log."""
    pids = dict(asked.get("pids") or {})
    for number, values in sorted(infos.items()):
        for name, pid in (values.get("pids") or {}).items():
            if name not in (asked.get("pids") or {}):
                pids[f"{name}/{number}"] = pid
    return pids


# More are not open: the frontend bounds them.
MAX_QUESTIONS = 1024
Answer = Info | ProgressAnswer
_decode = msgspec.msgpack.Decoder(Answer).decode


class MergedAnswer(NamedTuple):
    """The answer to the question of a client."""

    client: bytes
    message: Answer


@dataclass(slots=True)
class _Question:
    question: InfoRequest | ProgressRequest
    waits_for: set[int]
    answers: dict[int, Answer] = field(default_factory=dict)


class Questions:
    """Gather the answers of the replicas that were asked.

    Args:
        lists_replicas: as in merged_info.
    """

    def __init__(self, lists_replicas: bool) -> None:
        self._lists_replicas = lists_replicas
        self._open: OrderedDict[Name, _Question] = OrderedDict()

    def ask(self, question: InfoRequest | ProgressRequest, replicas: Iterable[int]) -> None:
        """Await the answers of these replicas."""
        self._open[question.client, question.request_id] = _Question(question, set(replicas))
        while len(self._open) > MAX_QUESTIONS:
            self._open.popitem(last=False)

    def open_at(self, replica: int) -> list[InfoRequest | ProgressRequest]:
        """Return the questions that a replica has not answered, oldest first."""
        return [asked.question for asked in self._open.values() if replica in asked.waits_for]

    def take(self, replica: int, client: bytes, payload: bytes) -> MergedAnswer | None:
        """Take in an answer. Return what the client gets, once the last one is there."""
        answer = _decode(payload)
        name = client, answer.request_id
        asked = self._open.get(name)
        if asked is None or replica not in asked.waits_for:
            return None
        asked.answers[replica] = answer
        asked.waits_for.discard(replica)
        return None if asked.waits_for else self._finish(name)

    def give_up(self, replica: int) -> Iterator[MergedAnswer]:
        """Do not wait for a replica that has died, unless there is no other answer.

        Yield the answers that are complete without it.
        """
        for name, asked in list(self._open.items()):
            if replica in asked.waits_for and (asked.answers or len(asked.waits_for) > 1):
                asked.waits_for.discard(replica)
                if not asked.waits_for:
                    yield self._finish(name)

    def _finish(self, name: Name) -> MergedAnswer:
        asked = self._open.pop(name)
        question, answers = asked.question, asked.answers
        if isinstance(question, InfoRequest):
            infos = {n: a.values for n, a in answers.items() if isinstance(a, Info)}
            merged = merged_info(question.values, infos, self._lists_replicas)
            return MergedAnswer(name[0], Info(name[1], merged))
        of_replicas = [a.values for a in answers.values() if isinstance(a, ProgressAnswer)]
        known = [max(values, key=_is_known) for values in zip(*of_replicas, strict=True)]
        return MergedAnswer(name[0], ProgressAnswer(name[1], known))


def _is_known(progress: RequestProgress) -> bool:
    return progress.state is not RequestState.UNKNOWN


class Dispatch:
    """Sends requests to schedulers: new ones, those that have waited, and those that move.

    Args:
        replicas: those that have joined.
        router: chooses the replicas.
        requests: the open requests.
        sender: number of this frontend, as in FrontendRestarted.

    Attributes:
        num_moved: number of requests that went on at another replica, as theirs was gone.
        num_handed_over: number of choices that went on at one when their prompt was computed.
    """

    def __init__(
        self, replicas: ReplicaSet, router: Router[RouterKey], requests: OpenRequests, sender: int
    ) -> None:
        self._replicas = replicas
        self._router = router
        self._requests = requests
        self._sender = sender
        self._waiting: dict[Name, PlacedRequest] = {}
        self._is_draining = False
        self.num_moved = 0
        self.num_handed_over = 0

    def dispatch(self, placed: PlacedRequest) -> None:
        """Send the choices of a request to their owners, and the others to a replica.

        A request that some replica may have waits until all have said what they hold. So does one
        that a replica may be about to give back.
        """
        owners = placed.open_by_owner()
        if self._must_wait(placed, owners):
            self._waiting[placed.name] = placed
            return
        placed.waits = False
        for owner, indexes in owners.items():
            message = self._requests.sent_again(placed, owner, indexes)
            self._send(placed, message, owner.replica)
        if placed.homeless:
            self._place(placed)

    def _must_wait(self, placed: PlacedRequest, owners: Iterable[ChoiceOwner]) -> bool:
        assert placed.submit is not None
        is_sure = not placed.homeless and all(
            self._requests.is_of_this_frontend(owner.placement) for owner in owners
        )
        if placed.submit.client_retry and not is_sure and not self._replicas.all_known:
            return True
        return any(self._replicas[owner.replica].recall for owner in owners)

    def _place(self, placed: PlacedRequest) -> None:
        """Send the choices that are at no replica to one. They wait while there is none."""
        if not self._router.has_replica:
            self._waiting[placed.name] = placed
            return
        number, message = self._requests.place(placed)
        self._send(placed, message, number)

    def _send(self, placed: PlacedRequest, submit: Submit, number: int) -> None:
        """Send a request to a replica, and that it was aborted where its client has done so."""
        outbox = self._replicas[number].outbox
        outbox.send(submit)
        if placed.aborted_by:
            outbox.send(AbortRequest(*placed.name, placed.aborted_by, self._sender))

    def place_waiting(self) -> None:
        """Send the requests that have waited, once every replica has said what it holds."""
        if not (self._replicas.all_known and self._router.has_replica):
            return
        waiting, self._waiting = self._waiting, {}
        for placed in waiting.values():
            self.dispatch(placed)
        if waiting:
            self.send_drain()

    def abort(self, client: bytes, request_id: str, by: str) -> None:
        """Abort a request of a client, or with an empty id all of them, where they are."""
        message = AbortRequest(client, request_id, by, self._sender)
        for name, placed in self._requests.of_client(client).items():
            if request_id in ("", name):
                placed.aborted_by = by
        placed_one = self._requests.find(client, request_id)
        owners = {} if placed_one is None else placed_one.open_by_owner()
        if not owners:
            self._replicas.broadcast(message)
        for number in {owner.replica for owner in owners}:
            self._replicas[number].outbox.send(message)

    def withdraw(self, strays: Iterable[tuple[int, int]]) -> None:
        """Make replicas drop choices that they do not own: their numbers, and their schedulers'."""
        for number, seq in strays:
            self._replicas[number].outbox.send(Withdraw([seq]))

    def resend(self, number: int) -> None:
        """Send the requests of a replica to its new scheduler, which knows those it journaled."""
        for placed in self._requests.of_replica(number):
            for owner, indexes in placed.open_by_owner().items():
                if owner.replica == number:
                    self._send(placed, self._requests.resent(placed, owner, indexes), number)

    def move_all(self, number: int) -> int:
        """Move the requests of a replica that has them no more. Return their number."""
        moved = self._requests.of_replica(number)
        for placed in moved:
            self.num_moved += 1
            self._requests.take_back(placed, number)
            if placed.name not in self._waiting:
                self._place(placed)
        self._requests.forget_unsent(number)
        self.place_waiting()
        self.send_drain()
        return len(moved)

    def hand_over(self) -> None:
        """Let choices whose prompts are computed go on at replicas that generate tokens.

        A choice has its new owner from here on. What its old one has generated since then, or
        generates until it has read that it drops the choice, does not count.
        """
        num_before = self.num_handed_over
        for number, placed, indexes in list(self._requests.movable):
            if self._replicas[number].recall or placed.aborted_by:
                continue
            found = self._requests.hand_over(placed, indexes, number)
            if found is not None:
                self.num_handed_over += len(indexes)
                self._replicas[number].outbox.send(Withdraw(found.seqs))
                self._send(placed, found.submit, found.replica)
        if self.num_handed_over > num_before:
            self.send_drain()

    def load_ahead(self, number: int, stored: Iterable[StoredPrompt]) -> None:
        """Let replicas load the first pages of prompts while another one computes the last ones.

        Nothing depends on it: what is not loaded by then is loaded when the request goes on.
        """
        for prompt in stored:
            found = self._requests.load_ahead(number, prompt)
            if found is not None:
                self._replicas[found[0]].outbox.send(found[1])

    # --- drain ------------------------------------------------------------------------------------

    def begin_drain(self) -> None:
        """Let every replica finish what it has: the server stops."""
        self._is_draining = True
        self.send_drain()

    def send_drain(self) -> None:
        """Make every replica report when it has nothing left; it may have got more meanwhile."""
        if self._is_draining and not self._waiting:
            for _, replica in self._replicas.live():
                replica.has_drained = False
                replica.outbox.send(Drain())

    @property
    def has_drained(self) -> bool:
        """Whether the server stops, and neither a replica nor this class has a request left."""
        return self._is_draining and self._replicas.have_drained and not self._waiting


class LostRequests(NamedTuple):
    """The requests of a client that is gone: those that were aborted, and those that go on."""

    ended: list[PlacedRequest]
    kept: list[PlacedRequest]


class EndedChoice(NamedTuple):
    """The end of a choice.

    Attributes:
        request_id: id of its request.
        num_generated: number of its tokens.
        request: its request; None where that is not open.
    """

    request_id: str
    num_generated: int
    request: PlacedRequest | None


class ClientResult(NamedTuple):
    """A message for a client.

    Attributes:
        payload: the message, encoded; empty if `is_lost`.
        ended: the choices that end with it.
        num_waiting: length of all waiting queues; None where it is as it was.
        wait_s: expected wait of one more request; None where a queue is far from full.
        traces: of choices in `ended` that are traced.
        is_lost: `ended` are choices that were aborted because their client was lost: if it is back,
            and has sent the requests again, these ends are not theirs.
    """

    client: bytes
    payload: bytes
    ended: list[EndedChoice]
    num_waiting: int | None
    wait_s: float | None
    traces: list[RequestTrace]
    is_lost: bool


class ResultListener(Protocol):
    """What takes the results of all replicas: the frontend."""

    def deliver(self, result: ClientResult) -> None:
        """Pass a result on to its client."""

    def deliver_answer(self, client: bytes, payload: bytes) -> None:
        """Pass the answer to an InfoRequest or a ProgressRequest on to its client."""

    def on_drained(self) -> None:
        """Take in that no replica has anything left after the Drain."""

    def show(self, frame: bytes, replica: int) -> None:
        """Pass on a message of a replica's live feed, encoded."""

    def on_known(self, known: dict[Name, AdapterRef | None]) -> None:
        """Take in which requests the replicas knew when this frontend began, as in KnownRequest.

        It is called once all have said so, where this frontend replaces another one.
        """


class LiveMark(msgspec.Struct, tag="live_step", array_like=True):
    """A LiveStep, of which nothing is read."""


_decode_news = msgspec.msgpack.Decoder(StepNews).decode
_decode_addressless = msgspec.msgpack.Decoder(
    HandedBack | Withdrawn | KnownRequests | LiveMark
).decode
_decode_delivered = msgspec.msgpack.Decoder(Delivered).decode
_decode_chunks = msgspec.msgpack.Decoder(Chunks | Replay).decode


class Replicas:
    """Send requests to their replicas, and pass on what these deliver.

    Each choice of a request has one owner at a time (placed.py). When a replica is lost, its
    requests go on at the others from the tokens that were noted (open_requests.py). Results count
    only if they are of the owner, and of its last placement there. All others are dropped and
    counted, and their replica is made to drop the choice: after two deaths at once a replica may
    have what was moved.

    Args:
        num_replicas: number of replicas, each of which joins before it gets requests.
        router: chooses the replicas.
        block_tokens: tokens of a block of the router's index.
        on_recalled: called with the number of a replica that has given its requests back.
        sender: number of this frontend, larger than that of each one before it.
        lists_replicas: the server's info has the values of each replica.

    Attributes:
        requests: the open requests.
        listener: takes the results. It is set before the first one is received.
    """

    listener: ResultListener

    def __init__(
        self,
        num_replicas: int,
        router: Router[RouterKey],
        block_tokens: int,
        on_recalled: Callable[[int], None],
        sender: int | None = None,
        lists_replicas: bool = True,
    ) -> None:
        self._router = router
        self._on_recalled = on_recalled
        self._replicas = ReplicaSet(num_replicas, router)
        self._known: dict[Name, AdapterRef | None] = {}
        # A clock that never jumps is ahead of every number that an earlier frontend has given.
        self._sender = time.monotonic_ns() if sender is None else sender
        self.requests = OpenRequests(self._replicas, router, block_tokens, self._sender)
        self._dispatch = Dispatch(self._replicas, router, self.requests, self._sender)
        self._lists_replicas = lists_replicas
        self._questions = Questions(lists_replicas)
        self._replaces = False  # an earlier frontend has died
        self._last_recall = self._sender
        self._pins = PinAdapters([])

    # --- to the schedulers ------------------------------------------------------------------------

    def submit(self, submit: Submit, aborted_by: str = "", keep_s: float | None = None) -> bool:
        """Send a request, followed by its abort where `aborted_by` is not empty.

        One that is open is sent once more only if its client has sent it again
        (`submit.client_retry`); all of its choices will then end once more.

        Args:
            submit: the request.
            aborted_by: as in AbortRequest.
            keep_s: as in Generate.

        Returns:
            Whether it was not open before.
        """
        is_new = not self.requests.is_open(submit.client, submit.request_id)
        if is_new or submit.client_retry:
            self._dispatch.dispatch(self.requests.submit(submit, aborted_by, keep_s))
        return is_new

    def abort(self, client: bytes, request_id: str, by: str) -> None:
        """Abort one request of a client, or with an empty id all of them."""
        self._dispatch.abort(client, request_id, by)

    def lose_client(self, client: bytes) -> LostRequests:
        """Abort the requests of a client whose connection is lost; those with `keep_s` go on."""
        requests = self.requests.open_of_client(client)
        kept = [request for request in requests if request.keep_s is not None]
        ended = [request for request in requests if request.keep_s is None]
        for request_id in [request.name[1] for request in ended] if kept else [""]:
            self.abort(client, request_id, CLIENT_LOST)
        self.requests.lose(client, ended)
        return LostRequests(ended, kept)

    def end(self, request: PlacedRequest, submit: Submit | None, by: str) -> bool:
        """Abort a request for good. Return False if it has ended, or its client has resent it.

        Args:
            request: the request.
            submit: as its client had sent it last.
            by: as in AbortRequest.
        """
        if request.submit is not submit or not request.is_open:
            return False
        self.abort(*request.name, by)
        request.is_lost = True
        return True

    def send(self, message: msgspec.Struct) -> None:
        """Send a message of the frontend to the schedulers that it concerns."""
        match message:
            case InfoRequest() | ProgressRequest():
                self._ask(message)
            case WatchSteps():
                self._watch(message)
            case Drain():
                self._dispatch.begin_drain()
            case FrontendRestarted():
                self._replaces = True
                self._replicas.broadcast(FrontendRestarted(self._sender, wants_names=True))
            case _:
                self._replicas.broadcast(message)

    def pin_adapters(self, adapters: list[AdapterRef]) -> None:
        """Let these adapters, and no others, keep their places, also at schedulers to come."""
        self._pins = PinAdapters(adapters)
        self._replicas.broadcast(self._pins)

    def _ask(self, question: InfoRequest | ProgressRequest) -> None:
        if isinstance(question, InfoRequest) and self._lists_replicas:
            values = {
                **question.values,
                "num_replicas": self._replicas.size,
                "requests_moved": self._dispatch.num_moved,
                "results_dropped": self.requests.num_results_dropped,
            }
            if self._router.has_roles:
                values["requests_handed_over"] = self._dispatch.num_handed_over
                values["prefill_replicas"] = self._router.num_prefill
                values["role_changes"] = self._router.num_changes
            question = msgspec.structs.replace(question, values=values)
        self._questions.ask(question, self._replicas.answering)
        self._replicas.broadcast(question)

    def _watch(self, message: WatchSteps) -> None:
        """Let a replica make the live feed, or end it.

        Raises:
            InvalidRequest: the replica is lost.
        """
        replica = self._replicas.find_live(message.replica)
        if replica is not None:
            replica.outbox.send(message)
        elif message.seconds > 0:
            raise errors.InvalidRequest(
                f"replica {message.replica} is lost: watch another one, or start the server again",
                "replica",
            )

    # --- from the detokenizers --------------------------------------------------------------------

    def on_delivery(self, number: int, frames: list[bytes]) -> None:
        """Take in three frames of a replica's detokenizer."""
        replica = self._replicas[number]
        client, payload, delivered_frame = frames
        if replica.is_lost:
            return
        if not client and delivered_frame:
            self._on_news(number, _decode_news(delivered_frame))
        elif payload and not client:
            self._on_addressless(number, payload)
        elif replica.is_cut or self._is_strange(replica):
            return
        elif client:
            self._on_result(number, client, payload, _decode_delivered(delivered_frame))
        else:
            replica.has_drained = True
            self._report_drained()

    def _on_addressless(self, number: int, payload: bytes) -> None:
        match _decode_addressless(payload):
            case HandedBack() as answer:
                self._on_handed_back(number, answer)
            case Withdrawn() as answer:
                self.requests.on_withdrawn(number, answer.seqs)
            case KnownRequests() as answer:
                for known in answer.requests:
                    name = known.client, known.request_id
                    self._known[name] = known.adapter or self._known.get(name)
            case _:
                self.listener.show(payload, number)

    def _report_drained(self) -> None:
        if self._dispatch.has_drained:
            self.listener.on_drained()

    def _on_result(self, number: int, client: bytes, payload: bytes, delivered: Delivered) -> None:
        replica = self._replicas[number]
        if delivered.inspected:
            answer = self._questions.take(number, client, payload)
            if answer is not None:
                self._deliver_answer(answer)
            return
        num_waiting: int | None = None
        wait_s: float | None = None
        dropped: set[tuple[str, int]] = set()
        handed_over: set[tuple[str, int]] = set()
        ended: list[EndedChoice] = []
        if delivered.waiting is not None:
            replica.num_waiting, replica.wait_s = delivered.waiting, delivered.wait_s
            num_waiting, wait_s = self._replicas.queue
        if replica.strays:
            strays = [run for run in replica.strays.values() if run.name[0] == client]
            dropped = {(run.name[1], run.index) for run in strays}
            handed_over = {(run.name[1], run.index) for run in strays if run.was_handed_over}
        if delivered.ended:
            ended = self._count_ends(number, client, delivered, dropped)
        if delivered.settled:
            replica.outbox.send(EndsDelivered(delivered.settled, delivered.session, self._sender))
        if dropped and payload:
            payload = self._without(payload, dropped, handed_over)
            if not payload:
                return
        traces = self._traces_of(number, delivered, dropped)
        lost = delivered.lost
        self.listener.deliver(
            ClientResult(client, payload, ended, num_waiting, wait_s, traces, lost)
        )

    def _traces_of(
        self, number: int, delivered: Delivered, dropped: set[tuple[str, int]]
    ) -> list[RequestTrace]:
        """Return the traces of a message without those of choices that are dropped."""
        traces = [t for t in delivered.traces if (t.request_id, t.index) not in dropped]
        for trace in traces if self._lists_replicas else ():
            note_replica(trace.spans, number)
        return traces

    def _count_ends(
        self, number: int, client: bytes, delivered: Delivered, dropped: set[tuple[str, int]]
    ) -> list[EndedChoice]:
        """Return the ends of a message. Add the choices that are not the replica's to `dropped`."""
        ended = []
        ends = zip(
            delivered.ended, delivered.indexes, delivered.placements, delivered.generated,
            strict=True,
        )  # fmt: skip
        for request_id, index, placement, num_generated in ends:
            end = self.requests.on_end(number, (client, request_id), index, placement)
            if end.kind is EndKind.DROPPED:
                dropped.add((request_id, index))
            elif end.kind is EndKind.COUNTED or delivered.lost:
                ended.append(EndedChoice(request_id, num_generated, end.request))
        return ended

    def _without(
        self, payload: bytes, dropped: set[tuple[str, int]], handed_over: set[tuple[str, int]]
    ) -> bytes:
        """Return a message without the chunks of choices that are dropped; empty if none is left.

        Those of choices that were handed over are expected, and not counted.
        """
        message = _decode_chunks(payload)
        kept = [c for c in message.chunks if (c.request_id, c.index) not in dropped]
        names = ((c.request_id, c.index) for c in message.chunks)
        self.requests.num_results_dropped += sum(n in dropped - handed_over for n in names)
        if not kept:
            return b""
        return encode_chunks(msgspec.structs.replace(message, chunks=kept))

    def _deliver_answer(self, answer: MergedAnswer) -> None:
        self.listener.deliver_answer(answer.client, encode(answer.message))

    def _on_news(self, number: int, step: StepNews) -> None:
        """Note the tokens of a step, whose texts follow."""
        replica, restates = self._replicas[number], step.news.restates
        if replica.is_cut and not restates:
            return
        if self._is_strange(replica) and not (restates and step.news.frontend == self._sender):
            return
        replica.is_cut = False
        self._dispatch.withdraw(self.requests.on_news(number, step))
        if self._router.follow_load(time.monotonic()):
            logging.info("%d replicas compute prompts from now on", self._router.num_prefill)
        self._dispatch.hand_over()
        self._dispatch.load_ahead(number, step.news.stored)
        if restates and not replica.is_known:
            replica.is_known = True
            self._report_known()
            self._dispatch.place_waiting()

    def _report_known(self) -> None:
        if self._replaces and self._replicas.all_known:
            self.listener.on_known(self._known)

    def _is_strange(self, replica: ReplicaState) -> bool:
        """Return whether what a replica sends may be older than this frontend."""
        return self._replaces and not replica.is_known

    def _announce(self, replica: ReplicaState) -> None:
        """Send a scheduler, new or restarted, what it has to know of this frontend.

        One that may be older than this frontend is asked what it holds.
        """
        if self._is_strange(replica):
            replica.outbox.send(FrontendRestarted(self._sender, wants_names=True))
        if self._pins.adapters:
            replica.outbox.send(self._pins)

    # --- joins and broken links -------------------------------------------------------------------

    def join(self, number: int, outbox: Outbox) -> None:
        """Give requests to a replica from now on.

        Args:
            number: of the replica, of which an earlier run may be lost.
            outbox: to its scheduler.
        """
        self._replicas.join(number, outbox)
        self._announce(self._replicas[number])
        self._dispatch.send_drain()

    def on_link_broken(self, number: int) -> None:
        """Make a replica send everything again: what was on the link may be lost.

        A replica on another machine gets it first of all: it may have had another frontend.
        """
        replica = self._replicas[number]
        if not replica.is_lost:
            replica.is_cut = True
            self._give_up_answers(number)
            self._resend(number, LinkRestored(__version__))

    # --- deaths -----------------------------------------------------------------------------------

    def on_died(self, number: int, process: str) -> None:
        """Take in that a process of a replica has died, and is being restarted."""
        self._replicas[number].dead.add(process)
        self._replicas.set_up()
        self._give_up_answers(number)

    def on_restarted(self, number: int, process: str) -> None:
        """Take in that a process of a replica is ready again."""
        replica = self._replicas[number]
        replica.dead.discard(process)
        replica.is_held = replica.is_held and process != "worker_proc"
        self._replicas.set_up()
        if process == "scheduler_proc":
            self._resend(number)
            return
        if process == "detok_proc":
            self._ask_again(number)
        if replica.recall:  # the answer may be lost with what died
            self._recall(number)

    def _resend(self, number: int, *first: msgspec.Struct) -> None:
        """Send everything of a replica to its new scheduler, which knows what it had journaled.

        Args:
            number: the replica.
            first: messages that go before.
        """
        replica = self._replicas[number]
        replica.outbox.renew()
        self._announce(replica)
        for message in first:
            replica.outbox.send(message)
        self._dispatch.resend(number)
        self._ask_again(number)
        if replica.recall:  # the answer may be lost with what died
            self._recall(number)
        self._dispatch.send_drain()

    def _ask_again(self, number: int) -> None:
        """Send a replica the questions whose answers may be lost with what died."""
        for question in self._questions.open_at(number):
            self._replicas[number].outbox.send(question)

    def on_lost(self, number: int) -> None:
        """Move the requests of a replica that has ended for good to the others."""
        if self._replicas.find_live(number) is None:
            return
        for placed in self.requests.of_replica(number):
            placed.num_losses += 1
        num_moved = self._end(number)
        logging.warning("replica %d is lost: %d requests go on at others", number, num_moved)

    def on_left(self, number: int) -> None:
        """Take in that a replica has ended, which had given its requests back."""
        if self._replicas.find_live(number) is not None:
            self._end(number)

    def _end(self, number: int) -> int:
        """Move what a replica has that is there no more. Return the number of requests."""
        replica = self._replicas[number]
        replica.is_lost = True
        replica.outbox.close()
        self._replicas.set_up()
        self._give_up_answers(number)
        self.requests.forget_ended(number)
        num_moved = self._dispatch.move_all(number)
        self._report_known()
        self._dispatch.place_waiting()
        self._dispatch.send_drain()
        self._report_drained()
        return num_moved

    # --- recalls ----------------------------------------------------------------------------------

    def recall(self, number: int) -> None:
        """Move the requests of a replica to the others, before its worker is restarted.

        They stay, and pause, where no other replica takes requests.
        """
        self._replicas[number].is_held = True
        self._replicas.set_up()
        if self._router.is_up(number):
            self._on_recalled(number)
        else:
            self._recall(number)

    def _recall(self, number: int) -> None:
        self._last_recall += 1
        self._replicas[number].recall = self._last_recall
        self._replicas.set_up()
        self._replicas[number].outbox.send(Recall(self._last_recall))

    def _on_handed_back(self, number: int, answer: HandedBack) -> None:
        """Send the requests of a replica to others; everything that it had sent has come."""
        replica = self._replicas[number]
        if answer.number != replica.recall:
            return
        replica.recall = 0
        self._replicas.set_up()
        self._dispatch.move_all(number)
        self._on_recalled(number)

    def _give_up_answers(self, number: int) -> None:
        for answer in list(self._questions.give_up(number)):
            self._deliver_answer(answer)
