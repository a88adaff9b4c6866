"""Requests at several replicas: sent, aborted, moved with their tokens, and drained."""

from dataclasses import dataclass, field
from typing import Any, cast

import msgspec
import pytest

from quadriga import __version__
from quadriga.errors import InvalidRequest
from quadriga.sampling.params import SamplingParams
from quadriga.server.config.engine_args import IN_TURN
from quadriga.wire.adapter import AdapterRef
from quadriga.wire.client import Chunk, Chunks, Info, ProgressAnswer, RequestProgress, RequestState
from quadriga.wire.live import RowKind
from quadriga.wire.packing import pack_ids
from quadriga.wire.sockets import Outbox, encode
from quadriga.wire.to_detok import (
    Delivered,
    EndedRequest,
    HandedBack,
    HeldChoice,
    ReplicaNews,
    StepNews,
)
from quadriga.wire.to_scheduler import (
    CLIENT,
    CLIENT_LOST,
    AbortRequest,
    ChoiceProgress,
    Drain,
    EndsDelivered,
    InfoRequest,
    LinkRestored,
    PinAdapters,
    ProgressRequest,
    Recall,
    Submit,
    WatchSteps,
)
from quadriga.wire.trace import RequestTrace, Span, TraceContext
from tests.unit.live_messages import make_step
from tokenizer_proc.replicas.placed import Name, RouterKey
from tokenizer_proc.replicas.replicas import ClientResult, Replicas
from tokenizer_proc.replicas.router import Router

BLOCK, PAGE = 64, 16
SENDER = 1000  # number of the frontend


@dataclass
class FakeOutbox:
    """Keeps what is sent.

    Attributes:
        num_renewals: number of calls of `renew`.
        placements: of the requests that were sent, by their ids.
    """

    sent: list[msgspec.Struct] = field(default_factory=list)
    num_renewals: int = 0
    is_closed: bool = False
    placements: dict[str, int] = field(default_factory=dict)

    def send(self, message: msgspec.Struct) -> None:
        self.sent.append(message)
        if isinstance(message, Submit):
            self.placements[message.request_id] = message.placement

    def close(self) -> None:
        self.is_closed = True

    def renew(self) -> None:
        self.num_renewals += 1

    def take(self) -> list[msgspec.Struct]:
        sent, self.sent = self.sent, []
        return sent


class World:
    """Two replicas in turn, whose messages a test makes."""

    def __init__(self, num_replicas: int = 2, is_known: bool = True) -> None:
        self.outboxes = [FakeOutbox() for _ in range(num_replicas)]
        self.delivered: list[ClientResult] = []
        self.answers: list[tuple[bytes, bytes]] = []
        self.has_drained = False
        self.recalled: list[int] = []
        self.shown: list[tuple[int, bytes]] = []
        self.known: list[set[Name]] = []
        router = Router[RouterKey](IN_TURN, num_replicas, BLOCK, PAGE, 100)
        self.replicas = Replicas(num_replicas, router, BLOCK, self.recalled.append, sender=SENDER)
        self.replicas.listener = self
        self.router = router
        for number, outbox in enumerate(self.outboxes):
            self.replicas.join(number, cast("Outbox", outbox))
            outbox.take()
        for number in range(num_replicas if is_known else 0):
            self.news(number, restates=True)

    def deliver(self, result: ClientResult) -> None:
        self.delivered.append(result)

    def deliver_answer(self, client: bytes, payload: bytes) -> None:
        self.answers.append((client, payload))

    def on_drained(self) -> None:
        self.has_drained = True

    def show(self, frame: bytes, replica: int) -> None:
        self.shown.append((replica, frame))

    def on_known(self, known: dict[Name, Any]) -> None:
        self.known.append(set(known))

    def submit(self, request_id: str, n: int = 1, retry: bool = False, **params: Any) -> int:
        """Submit a request, and return the replica that got it; -1 for none."""
        sampling = SamplingParams(max_new_tokens=9, seed=0, n=n, **params)
        prompt = pack_ids(range(10))
        self.replicas.submit(
            Submit(b"c", request_id, prompt, sampling, True, 1.0, 2.0, client_retry=retry)
        )
        got = [n for n, outbox in enumerate(self.outboxes) if self._has(outbox, request_id)]
        for outbox in self.outboxes:
            outbox.take()
        return got[0] if got else -1

    @staticmethod
    def _has(outbox: FakeOutbox, request_id: str) -> bool:
        return any(isinstance(m, Submit) and m.request_id == request_id for m in outbox.sent)

    def news(
        self,
        number: int,
        started: list[tuple[int, str, int]] | None = None,
        tokens: dict[int, int] | None = None,
        **fields: Any,
    ) -> None:
        """Report a step: started choices as (seq, id, index), and tokens by seq."""
        choices = [
            HeldChoice(seq, b"c", name, index, b"", 5.0, self.placement(number, name))
            for seq, name, index in started or ()
        ]
        fields["held"] = [
            one
            if one.placement
            else msgspec.structs.replace(one, placement=self.placement(number, one.request_id))
            for one in fields.get("held", [])
        ]
        seqs = list(tokens or {})
        step = StepNews(ReplicaNews(**fields), choices, seqs, pack_ids((tokens or {}).values()))
        self.replicas.on_delivery(number, [b"", b"", encode(step)])

    def placement(self, number: int, request_id: str) -> int:
        """Return the last placement of a request at a replica; 0 for one of an earlier frontend."""
        return self.outboxes[number].placements.get(request_id, 0)

    def end(
        self,
        number: int,
        request_id: str,
        index: int = 0,
        settled: int = 0,
        lost: bool = False,
        placement: int | None = None,
    ) -> None:
        if placement is None:
            placement = self.placement(number, request_id)
        delivered = Delivered(
            [request_id], 3, {settled: 0}, False, [2], lost=lost, indexes=[index],
            placements=[placement],
        )  # fmt: skip
        payload = encode(Chunks([Chunk(request_id, 0, "t", b"", [], None, index)]))
        self.replicas.on_delivery(number, [b"c", payload, encode(delivered)])

    def hand_back(self, number: int, recall: int) -> None:
        self.replicas.on_delivery(number, [b"", encode(HandedBack(recall)), b""])


def moved(messages: list[msgspec.Struct]) -> list[Submit]:
    return [m for m in messages if isinstance(m, Submit) and m.frontend_retry]


def abort(request_id: str, by: str) -> AbortRequest:
    return AbortRequest(b"c", request_id, by, SENDER)


def test_a_request_goes_on_at_another_replica_with_the_tokens_that_its_client_may_have() -> None:
    world = World()
    home = world.submit("a")
    world.news(home, [(70, "a", 0)], {70: 11})
    world.news(home, None, {70: 12})
    world.replicas.on_lost(home)
    (message,) = moved(world.outboxes[1 - home].take())
    assert message.progress == [ChoiceProgress(0, pack_ids([11, 12]), 5.0)]
    assert message.frontend_retry
    assert not message.client_retry
    # The other one restates it with a number of its own, and it may be lost, too.
    world.news(1 - home, None, {}, held=[HeldChoice(5, b"c", "a", 0, pack_ids([11, 12]), 5.0)])
    world.news(1 - home, None, {5: 13})
    world.end(1 - home, "a", settled=5)
    result = world.delivered[-1]
    assert [(end.request_id, end.num_generated) for end in result.ended] == [("a", 2)]
    assert result.num_waiting == 3
    assert EndsDelivered({5: 0}, 0, SENDER) in world.outboxes[1 - home].take()
    assert world.router.ledger.costs == [0.0, 0.0]


def test_a_lost_replica_delivers_nothing_more() -> None:
    world = World()
    home = world.submit("a")
    world.replicas.on_lost(home)
    world.end(home, "a")
    assert world.delivered == []


def test_choices_that_have_ended_do_not_move() -> None:
    world = World()
    home = world.submit("a", n=3)
    world.news(home, [(7, "a", 0), (8, "a", 1)], {7: 1, 8: 2})
    world.end(home, "a", index=0)
    world.replicas.on_lost(home)
    (message,) = moved(world.outboxes[1 - home].take())
    assert message.progress == [ChoiceProgress(1, pack_ids([2]), 5.0), ChoiceProgress(2)]


def test_a_request_with_logprobs_begins_anew() -> None:
    world = World()
    home = world.submit("a", logprobs=1)
    world.news(home, [(7, "a", 0)], {7: 1})
    world.replicas.on_lost(home)
    (message,) = moved(world.outboxes[1 - home].take())
    assert message.progress == [ChoiceProgress(0)]


def test_the_spans_of_a_replica_have_its_number() -> None:
    world = World()
    home = world.submit("a")
    trace = RequestTrace(
        TraceContext("0" * 32, "1" * 16), "llm_request", "a", 0,
        [
            Span("tokenize", "tokenizer_proc", 1.0, 2.0),
            Span("prefill", "scheduler_proc", 2.0, 3.0, {"replica": 7}),
            Span("decode", "scheduler_proc", 3.0, 4.0),
        ],
    )  # fmt: skip
    delivered = Delivered(
        ["a"], 0, {}, False, [2], indexes=[0], placements=[world.placement(home, "a")],
        traces=[trace],
    )  # fmt: skip
    payload = encode(Chunks([Chunk("a", 0, "t", b"", [], None, 0)]))
    world.replicas.on_delivery(home, [b"c", payload, encode(delivered)])
    (found,) = world.delivered[-1].traces
    assert [span.attributes.get("replica") for span in found.spans] == [None, 7, home]


def test_an_abort_follows_its_request() -> None:
    world = World()
    home = world.submit("a")
    other = world.submit("b")
    world.replicas.abort(b"c", "a", CLIENT)
    assert world.outboxes[home].take() == [abort("a", CLIENT)]
    assert world.outboxes[other].take() == []
    world.replicas.on_lost(home)
    assert abort("a", CLIENT) in world.outboxes[other].take()
    world.replicas.abort(b"c", "", CLIENT_LOST)
    assert world.outboxes[other].take() == [abort("", CLIENT_LOST)]


def test_a_request_that_is_sent_again_outlives_the_abort_of_its_lost_client() -> None:
    world = World()
    home = world.submit("a")
    world.news(home, [(7, "a", 0)], {7: 1})
    world.replicas.abort(b"c", "", CLIENT_LOST)
    placement = world.placement(home, "a")
    assert world.submit("a", retry=True) == home
    world.end(home, "a", lost=True, placement=placement)
    world.news(home, [(8, "a", 0)], {8: 1})
    world.replicas.on_died(home, "scheduler_proc")
    world.replicas.on_restarted(home, "scheduler_proc")
    sent = world.outboxes[home].take()
    assert [message.progress for message in moved(sent)] == [
        [ChoiceProgress(0, pack_ids([1]), 5.0)]
    ]
    assert not any(isinstance(message, AbortRequest) for message in sent)
    world.end(home, "a")
    assert world.router.ledger.costs == [0.0, 0.0]


def test_the_end_of_a_lost_request_takes_it_off_its_replica() -> None:
    world = World()
    home = world.submit("a")
    world.replicas.abort(b"c", "", CLIENT_LOST)
    world.end(home, "a", lost=True)
    assert world.router.ledger.costs == [0.0, 0.0]
    assert world.delivered[-1].is_lost


def test_the_end_of_a_lost_request_that_came_with_a_replica_takes_it_off() -> None:
    world = World()
    held = [HeldChoice(5, b"c", "a", 0, pack_ids([11]), 5.0)]
    world.news(1, restates=True, held=held)
    assert world.router.ledger.num_open == 1
    world.end(1, "a", lost=True)
    assert world.router.ledger.num_open == 0


def test_a_new_scheduler_is_sent_what_its_replica_has() -> None:
    world = World()
    home = world.submit("a")
    world.submit("b")
    world.news(home, [(7, "a", 0)], {7: 1})
    world.replicas.on_died(home, "scheduler_proc")
    assert [world.submit(f"{n}") for n in range(3)] == [1 - home] * 3
    world.replicas.on_restarted(home, "scheduler_proc")
    assert world.outboxes[home].num_renewals == 1
    (message,) = moved(world.outboxes[home].take())
    assert (message.request_id, message.progress) == ("a", [ChoiceProgress(0, pack_ids([1]), 5.0)])
    assert home in [world.submit(f"later-{n}") for n in range(2)]


def test_a_new_frontend_sends_a_request_to_the_replica_that_has_it() -> None:
    world = World(is_known=False)
    assert world.submit("queued", retry=True) == -1
    assert world.submit("ended", retry=True) == -1
    assert world.submit("unknown", retry=True) == -1
    assert world.submit("new") >= 0
    held = [HeldChoice(3, b"c", "queued", 0), HeldChoice(4, b"c", "left", 0, pack_ids([5]), 1.0)]
    world.news(1, restates=True, held=held)
    assert world.outboxes[1].take() == []
    world.news(0, restates=True, ended=[EndedRequest(b"c", "ended", {0: 7})])
    sent = [
        {m.request_id for m in outbox.take() if isinstance(m, Submit)} for outbox in world.outboxes
    ]
    assert "queued" in sent[1]
    assert "ended" in sent[0]
    assert "unknown" in sent[0] | sent[1]
    # The client of `left` never comes back: its end is not passed on as one of this frontend's.
    world.end(1, "left")
    assert world.submit("left", retry=True) == 1


def test_a_request_that_was_aborted_while_it_waited_is_aborted_where_it_is_sent() -> None:
    """The replica that has it may have ended and forgotten it by then: it would run again."""
    world = World(is_known=False)
    world.submit("a", retry=True)
    world.replicas.abort(b"c", "a", CLIENT)
    world.news(1, restates=True, held=[HeldChoice(3, b"c", "a", 0)])
    world.outboxes[1].take()
    world.news(0, restates=True)
    submit, aborted = world.outboxes[1].take()
    assert isinstance(submit, Submit) and aborted == abort("a", CLIENT)


def test_a_replica_that_is_lost_does_not_keep_others_waiting() -> None:
    world = World(is_known=False)
    world.submit("a", retry=True)
    world.news(1, restates=True)
    world.replicas.on_lost(0)
    assert [m.request_id for m in world.outboxes[1].take() if isinstance(m, Submit)] == ["a"]


def test_an_answer_to_a_question_is_made_of_all_replicas() -> None:
    world = World()
    world.replicas.send(InfoRequest(b"c", "q", {"model": "m", "pids": {"tokenizer_proc": 1}}))
    for number in range(2):
        values = {
            "model": "m", "requests_moved": 0, "running": 2 + number, "ready": number == 1,
            "page_size": 16, "stage_seconds": {"queue": {"1": 1, "sum": 0.5}}, "dtype": "float32",
            "pids": {"tokenizer_proc": 1, "scheduler_proc": 10 + number}, "hits": [number, 5],
            "adapters": {"max": 4, "loads": 3, "loaded": ["a", "b"] if number else ["a"]},
        }  # fmt: skip
        info = encode(Info("q", values))
        answered = encode(Delivered(inspected=True))
        assert world.answers == []
        world.replicas.on_delivery(number, [b"c", info, answered])
    (client, payload) = world.answers[0]
    found = msgspec.msgpack.decode(payload, type=Info).values
    assert client == b"c"
    assert (found["running"], found["ready"], found["page_size"]) == (5, True, 16)
    assert found["stage_seconds"] == {"queue": {"1": 2, "sum": 1.0}}
    assert found["hits"] == [1, 10]
    assert found["adapters"] == {"max": 4, "loads": 6, "loaded": ["a", "b"]}
    assert found["pids"] == {"tokenizer_proc": 1, "scheduler_proc/0": 10, "scheduler_proc/1": 11}
    assert [(one["replica"], one["running"]) for one in found["replicas"]] == [(0, 2), (1, 3)]


def test_progress_is_that_of_the_replica_which_has_the_request() -> None:
    world = World()
    world.replicas.send(ProgressRequest(b"c", "q", ["a", "b"]))
    known, unknown = RequestProgress(RequestState.DECODING), RequestProgress(RequestState.UNKNOWN)
    for number, values in enumerate([[unknown, known], [known, unknown]]):
        answer = encode(ProgressAnswer("q", values))
        world.replicas.on_delivery(number, [b"c", answer, encode(Delivered(inspected=True))])
    answer_type = msgspec.msgpack.decode(world.answers[0][1], type=ProgressAnswer)
    assert answer_type.values == [known, known]


def test_a_replica_that_dies_does_not_keep_an_answer_back() -> None:
    world = World()
    world.replicas.send(InfoRequest(b"c", "q", {}))
    info = encode(Info("q", {"running": 2}))
    world.replicas.on_delivery(1, [b"c", info, encode(Delivered(inspected=True))])
    assert world.answers == []
    world.replicas.on_died(0, "worker_proc")
    assert len(world.answers) == 1
    world.replicas.send(InfoRequest(b"c", "r", {}))
    info = encode(Info("r", {"running": 2}))
    world.replicas.on_delivery(1, [b"c", info, encode(Delivered(inspected=True))])
    assert len(world.answers) == 2


def test_the_only_replica_answers_while_its_worker_is_restarted() -> None:
    world = World(num_replicas=1)
    for request_id in ("before", "after"):
        world.replicas.send(InfoRequest(b"c", request_id, {}))
        world.replicas.on_died(0, "worker_proc")
        info = encode(Info(request_id, {"ready": False}))
        world.replicas.on_delivery(0, [b"c", info, encode(Delivered(inspected=True))])
    assert len(world.answers) == 2


@pytest.mark.parametrize("process", ["scheduler_proc", "detok_proc"])
def test_a_question_is_asked_again_when_its_answer_may_be_lost(process: str) -> None:
    world = World(num_replicas=1)
    answered, open_ = InfoRequest(b"c", "answered", {}), ProgressRequest(b"c", "open", ["a"])
    for question in (answered, open_):
        world.replicas.send(question)
    info = encode(Info("answered", {"ready": True}))
    world.replicas.on_delivery(0, [b"c", info, encode(Delivered(inspected=True))])
    world.outboxes[0].take()
    world.replicas.on_died(0, process)
    world.replicas.on_restarted(0, process)
    asked = (InfoRequest, ProgressRequest)
    assert [m for m in world.outboxes[0].take() if isinstance(m, asked)] == [open_]


def test_the_server_has_drained_when_every_replica_has() -> None:
    world = World()
    home = world.submit("a")
    world.replicas.send(Drain())
    world.replicas.on_delivery(1 - home, [b"", b"", b""])
    assert not world.has_drained
    world.replicas.on_lost(home)  # its request is at the other one now, which says it again
    assert not world.has_drained
    world.replicas.on_delivery(1 - home, [b"", b"", b""])
    assert world.has_drained


def test_the_requests_of_a_recalled_replica_move_when_it_has_sent_everything() -> None:
    world = World()
    home = world.submit("a")
    world.news(home, [(7, "a", 0)], {7: 11})
    world.replicas.recall(home)
    assert world.outboxes[home].take() == [Recall(SENDER + 1)]
    assert [world.submit(f"{n}") for n in range(3)] == [1 - home] * 3
    world.news(home, None, {7: 12})
    assert world.recalled == []
    world.hand_back(home, SENDER + 1)
    assert world.recalled == [home]
    (message,) = moved(world.outboxes[1 - home].take())
    assert message.progress == [ChoiceProgress(0, pack_ids([11, 12]), 5.0)]
    assert message.num_losses == 0
    world.replicas.on_died(home, "worker_proc")
    world.replicas.on_restarted(home, "worker_proc")
    assert home in [world.submit(f"later-{n}") for n in range(2)]


def test_a_recall_is_repeated_where_its_answer_may_be_lost() -> None:
    world = World()
    home = world.submit("a")
    world.replicas.recall(home)
    world.replicas.on_died(home, "detok_proc")
    world.replicas.on_restarted(home, "detok_proc")
    assert world.outboxes[home].take() == [Recall(SENDER + 1), Recall(SENDER + 2)]
    world.hand_back(home, SENDER + 1)
    assert world.recalled == []
    world.hand_back(home, SENDER + 2)
    world.hand_back(home, SENDER + 2)
    assert world.recalled == [home]
    assert len(moved(world.outboxes[1 - home].take())) == 1


def test_the_requests_of_the_only_replica_that_runs_stay_there() -> None:
    world = World()
    home = world.submit("a")
    world.replicas.on_lost(1 - home)
    world.replicas.recall(home)
    assert world.recalled == [home]
    assert moved(world.outboxes[home].take()) == []


def test_a_replica_that_has_left_gets_no_requests_and_costs_none() -> None:
    world = World()
    home = world.submit("a")
    world.news(home, [(7, "a", 0)], {7: 11})
    world.replicas.recall(home)
    world.hand_back(home, SENDER + 1)
    world.replicas.on_left(home)
    assert world.outboxes[home].is_closed
    (message,) = moved(world.outboxes[1 - home].take())
    assert message.num_losses == 0
    assert [world.submit(f"{n}") for n in range(3)] == [1 - home] * 3
    world.replicas.on_left(home)


def test_the_load_is_the_number_of_open_requests() -> None:
    world = World()
    changes: list[int] = []
    requests = world.replicas.requests
    requests.on_change = lambda: changes.append(len(requests))
    for name in "abc":
        world.submit(name)
    world.end(0, "a")
    world.end(1, "a")
    assert changes == [1, 2, 3, 2]
    world.news(0, restates=True, held=[HeldChoice(9, b"c", "of the frontend before", 0, b"", 5.0)])
    assert changes == [1, 2, 3, 2, 3]


def test_requests_wait_while_there_is_no_replica_and_go_to_the_first_that_joins() -> None:
    world = World(num_replicas=1)
    assert world.submit("a") == 0
    world.news(0, [(7, "a", 0)], {7: 11})
    world.replicas.on_lost(0)
    assert world.submit("new") == -1
    world.replicas.send(Drain())
    assert not world.has_drained
    outbox = FakeOutbox()
    world.outboxes = [outbox]
    world.replicas.join(0, cast("Outbox", outbox))
    world.news(0, restates=True)
    sent = {m.request_id: m for m in outbox.take() if isinstance(m, Submit)}
    assert sent.keys() == {"a", "new"}
    (message,) = moved(list(sent.values()))
    assert message.request_id == "a"
    assert message.progress == [ChoiceProgress(0, pack_ids([11]), 5.0)]


def test_a_request_that_ended_at_a_lost_replica_runs_again_if_its_client_asks() -> None:
    world = World()
    home = world.submit("a")
    world.end(home, "a")
    world.replicas.on_lost(home)
    assert world.submit("a", retry=True) == 1 - home


def test_nothing_of_a_cut_replica_counts_until_it_has_restated_everything() -> None:
    world = World(num_replicas=1)
    world.submit("a")
    world.news(0, [(7, "a", 0)], {7: 11})
    world.replicas.on_link_broken(0)
    sent = world.outboxes[0].take()
    assert sent[0] == LinkRestored(__version__)
    assert [m.request_id for m in moved(sent)] == ["a"]
    world.news(0, None, {7: 13})  # 12 was on the link
    world.end(0, "a")
    assert world.delivered == []
    world.news(0, restates=True, held=[HeldChoice(7, b"c", "a", 0, pack_ids([11, 12, 13]), 5.0)])
    world.end(0, "a")
    assert [result.client for result in world.delivered] == [b"c"]


def test_each_replica_has_a_live_feed_of_its_own() -> None:
    world = World()
    world.replicas.send(WatchSteps(10.0, is_new=True, replica=1))
    assert [outbox.take() for outbox in world.outboxes] == [[], [WatchSteps(10.0, True, 1)]]
    frame = encode(make_step(3, {1: RowKind.DECODE}))
    world.replicas.on_delivery(1, [b"", frame, b""])
    assert world.shown == [(1, frame)]
    world.replicas.on_lost(1)
    with pytest.raises(InvalidRequest, match="replica 1 is lost"):
        world.replicas.send(WatchSteps(10.0, replica=1))
    world.replicas.send(WatchSteps(0.0, replica=1))  # a viewer that leaves


def test_the_traces_of_a_replica_are_passed_on() -> None:
    world = World()
    home = world.submit("a")
    trace = RequestTrace(TraceContext("1" * 32, "2" * 16), "llm_request", "a", 0, [])
    delivered = Delivered(
        ended=["a"],
        indexes=[0],
        placements=[world.placement(home, "a")],
        generated=[1],
        traces=[trace],
    )
    world.replicas.on_delivery(home, [b"c", b"text", encode(delivered)])
    assert [result.traces for result in world.delivered] == [[trace]]


def test_each_scheduler_knows_which_adapters_are_pinned() -> None:
    world = World()
    pins = [AdapterRef("id", "a")]
    world.replicas.pin_adapters(pins)
    assert [outbox.take() for outbox in world.outboxes] == [[PinAdapters(pins)]] * 2
    world.replicas.on_died(0, "scheduler_proc")
    world.replicas.on_restarted(0, "scheduler_proc")
    assert PinAdapters(pins) in world.outboxes[0].take()
    world.replicas.on_lost(1)
    world.replicas.join(1, cast("Outbox", world.outboxes[1]))
    assert PinAdapters(pins) in world.outboxes[1].take()
