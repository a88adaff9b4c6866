"""The outbox to the detokenizer: ends until they are acknowledged, and replays.

A new detokenizer knows nothing, and messages to and from a crashed one are lost.
So a request that has ended is kept until the frontend has acknowledged its end, and then a while
longer, for clients that reconnect.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import msgspec

from quadriga.errors import QueueFull, ServerStopping
from quadriga.wire.sockets import Sender
from quadriga.wire.to_detok import EndedRequest, ForgetStreams, ReplicaNews, StreamReplay
from quadriga.wire.to_scheduler import Submit
from scheduler_proc.journal.events import StepEvents, stream_replay
from scheduler_proc.state.request import FinishReason, Request

REFUSALS = (QueueFull.code, ServerStopping.code)
MAX_REMEMBERED = 4096
MAX_REMEMBERED_BYTES = 1 << 26
# Tokens that are replayed in one step; one with logprobs counts as several. About 2 ms.
MAX_REPLAY_COST = 1 << 16
LOGPROB_COST = 16
BYTES_PER_COST = 8

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(StreamReplay).decode


class AcknowledgedEnd(NamedTuple):
    """A request whose end was acknowledged: its replay is encoded, which takes less memory."""

    name: tuple[bytes, str]
    choice: int
    received_at: float
    placement: int
    replay: bytes


class DetokOutbox:
    """Send step records to the detokenizer, and replay what it or a client has missed.

    Attributes:
        session: of the newest detokenizer, as in DetokReady.
    """

    def __init__(self, detok: Sender) -> None:
        self._detok = detok
        self.session = 0
        self._unacknowledged: dict[int, Request] = {}
        self._acknowledged: OrderedDict[int, AcknowledgedEnd] = OrderedDict()
        self._acknowledged_bytes = 0
        # Numbers of the ends that the frontend has to acknowledge, perhaps once more: a client that
        # sends its request again gets the end again, and may have ignored it before.
        self._due: dict[int, None] = {}
        # The choices whose replays are not sent yet, in order.
        self._awaits_replay: dict[int, Request | None] = {}
        # Numbers of the ended choices of a request that are kept, by their indexes.
        self._ended: dict[tuple[bytes, str], dict[int, int]] = {}

    def send(
        self,
        events: StepEvents,
        now: float,
        num_waiting: int,
        wait_s: float | None,
        news: ReplicaNews | None = None,
    ) -> None:
        """Send a record, if it has anything for the detokenizer, or there are news."""
        if events.has_output or news is not None:
            finished = events.finished
            if self._awaits_replay:
                finished = [request for request in finished if not self.awaits_replay(request)]
            self._detok.send(
                events.to_detok(now, num_waiting, wait_s, self.session, news, finished)
            )

    # --- ends -------------------------------------------------------------------------------------

    @property
    def all_acknowledged(self) -> bool:
        """Whether the frontend has every end, and every replay of one."""
        return not self._due

    def finish(self, request: Request) -> None:
        """Keep a request that has ended until its end is acknowledged."""
        self._unacknowledged[request.seq] = request
        self._due[request.seq] = None
        name = (request.client, request.request_id)
        self._ended.setdefault(name, {})[request.index] = request.seq

    def acknowledge(self, placements: Mapping[int, int]) -> list[int]:
        """Take in that the frontend has ends, of these placements. Return those that it awaited."""
        acknowledged = []
        for seq, placement in placements.items():
            if seq not in self._due or self._end(seq).placement != placement:
                continue
            del self._due[seq]
            acknowledged.append(seq)
            request = self._unacknowledged.get(seq)
            if request is not None and _is_replayable(request):
                del self._unacknowledged[seq]
                self._remember(request)
            elif request is not None:
                self.forget([seq])
        return acknowledged

    def _remember(self, request: Request) -> None:
        replay = _encode(_without_trace(stream_replay(request)))
        name = (request.client, request.request_id)
        self._acknowledged[request.seq] = AcknowledgedEnd(
            name, request.index, request.received_at, request.placement, replay
        )
        self._acknowledged_bytes += len(replay)
        while (
            len(self._acknowledged) > MAX_REMEMBERED
            or self._acknowledged_bytes > MAX_REMEMBERED_BYTES
        ):
            self.forget([next(iter(self._acknowledged))])

    def ended_choices(self, message: Submit, of_any_time: bool) -> dict[int, int]:
        """Return the numbers of a request's ended choices by index, as far as they are kept.

        Args:
            message: the request, of whose stay here the choices are.
            of_any_time: also of a request of this name that was received at another time.
        """
        ended, stay = self._ended.get((message.client, message.request_id), {}), message.stay
        return {
            index: seq
            for index, seq in ended.items()
            if self._can_replay(seq)
            and (end := self._end(seq)).placement in stay
            and (of_any_time or end.received_at == message.received_at)
        }

    def place_again(self, seqs: Iterable[int], placement: int) -> None:
        """Take in that ended choices were placed here once more, as in Submit."""
        for seq in seqs:
            if (request := self._unacknowledged.get(seq)) is not None:
                request.placement = placement
            else:
                end = self._acknowledged[seq]
                self._acknowledged[seq] = end._replace(placement=placement)

    def _end(self, seq: int) -> Request | AcknowledgedEnd:
        return self._unacknowledged.get(seq) or self._acknowledged[seq]

    def _can_replay(self, seq: int) -> bool:
        request = self._unacknowledged.get(seq)
        return request is None or _is_replayable(request)

    def replayable(self) -> Iterator[EndedRequest]:
        """Yield the ended requests of which a client that sends them again gets the ends."""
        for name, ended in self._ended.items():
            placements = {
                index: self._end(seq).placement
                for index, seq in ended.items()
                if self._can_replay(seq)
            }
            if placements:
                yield EndedRequest(*name, placements)

    def ended_of(self, message: Submit, indexes: list[int]) -> list[int]:
        """Return the numbers of these choices of a request, as far as their ends are kept."""
        ended = self._ended.get((message.client, message.request_id), {})
        return [ended[index] for index in indexes if index in ended]

    def forget(self, seqs: Iterable[int]) -> None:
        """Forget choices that are given up, open or ended: none is replayed or awaited here."""
        for seq in seqs:
            self._awaits_replay.pop(seq, None)
            self._due.pop(seq, None)
            if (request := self._unacknowledged.pop(seq, None)) is not None:
                self._forget_ended((request.client, request.request_id), request.index, seq)
            elif (end := self._acknowledged.pop(seq, None)) is not None:
                self._acknowledged_bytes -= len(end.replay)
                self._forget_ended(end.name, end.choice, seq)

    def _forget_ended(self, name: tuple[bytes, str], index: int, seq: int) -> None:
        ended = self._ended.get(name, {})
        if ended.get(index) == seq:
            del ended[index]
        if not ended:
            self._ended.pop(name, None)

    # --- replays ----------------------------------------------------------------------------------

    def on_detok_restarted(self, session: int) -> None:
        """Address a new detokenizer from now on."""
        self.session = session
        self._awaits_replay.clear()

    @property
    def seqs_to_replay(self) -> list[int]:
        """Numbers of ended requests that a new detokenizer or frontend has to see again."""
        others = [seq for seq in self._due if seq not in self._unacknowledged]
        return [*self._unacknowledged, *others]

    def ask_replays(self, live: Iterable[Request], ended: Iterable[int]) -> list[StreamReplay]:
        """Return the first of the replays that are due; `next_replays` returns the others.

        A replay grows with its request, and all of them are more than a step may take.

        Args:
            live: requests that have not ended.
            ended: numbers of ended ones.
        """
        self._awaits_replay.update({request.seq: request for request in live})
        for seq in ended:
            self._awaits_replay[seq] = None
            self._due[seq] = None
        replays = self.next_replays()
        if self._awaits_replay:
            self._detok.send(ForgetStreams(list(self._awaits_replay)))
        return replays

    @property
    def has_replays(self) -> bool:
        """Whether replays are not sent yet."""
        return bool(self._awaits_replay)

    def awaits_replay(self, request: Request) -> bool:
        """Return whether a request's replay, which will have its end, is not sent yet."""
        return request.seq in self._awaits_replay

    def next_replays(self) -> list[StreamReplay]:
        """Return as many of the replays that are due as a step may take, and one at least."""
        replays: list[StreamReplay] = []
        cost = 0
        while self._awaits_replay and cost < MAX_REPLAY_COST:
            seq, request = next(iter(self._awaits_replay.items()))
            del self._awaits_replay[seq]
            request = self._unacknowledged.get(seq) or request
            if request is not None:
                replays.append(stream_replay(request))
                cost += request.num_generated + LOGPROB_COST * len(request.logprobs)
            elif (end := self._acknowledged.get(seq)) is not None:
                replays.append(_remembered(end))
                cost += len(end.replay) // BYTES_PER_COST
            cost += 1
        return replays


def _remembered(end: AcknowledgedEnd) -> StreamReplay:
    """Return the replay of a request that has ended, of its last placement."""
    replay = _decode(end.replay)
    assert replay.closing is not None
    return msgspec.structs.replace(
        replay,
        opening=msgspec.structs.replace(replay.opening, placement=end.placement),
        closing=msgspec.structs.replace(replay.closing, placement=end.placement),
    )


def _without_trace(replay: StreamReplay) -> StreamReplay:
    """Return a replay of an end whose trace the frontend has already."""
    if replay.closing is None or replay.closing.trace is None:
        return replay
    closing = msgspec.structs.replace(replay.closing, trace=None)
    return msgspec.structs.replace(replay, closing=closing)


def _is_replayable(request: Request) -> bool:
    """Return whether a client that sends the request again gets its end.

    A request that was aborted because its client was lost, or that was refused, runs again.
    """
    refused = request.error is not None and request.error.code in REFUSALS
    return request.finish_reason is not FinishReason.ABORT and not refused
