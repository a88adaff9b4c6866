"""The outbox to the detokenizer: ends until they are acknowledged, and replays.

A new detokenizer knows nothing, and messages to and from a crashed one are lost.
So a request that has ended is kept until the frontend has acknowledged its end, and then a while
longer, for clients that reconnect.
"""

from collections import OrderedDict
from collections.abc import Iterable
from typing import NamedTuple, cast

import msgspec

from quadriga.errors import QueueFull, ServerStopping
from quadriga.wire.messages.replica_news import ReplicaNews
from quadriga.wire.messages.to_detok import PlainStreamReplay, StreamReplay
from scheduler_proc.events import StepEvents
from scheduler_proc.sender import Sender
from scheduler_proc.state.request import FinishReason, Request
from scheduler_proc.streams import stream_replay

REFUSALS = (QueueFull.code, ServerStopping.code)
MAX_REMEMBERED = 4096
MAX_REMEMBERED_BYTES = 1 << 26

_encode = msgspec.msgpack.Encoder().encode
# Without the trace, which the frontend has got with the end.
_decode = msgspec.msgpack.Decoder(PlainStreamReplay).decode


class AcknowledgedEnd(NamedTuple):
    """A request whose end was acknowledged: its replay is encoded, which takes less memory."""

    name: tuple[bytes, str]
    choice: int
    received_at: float
    replay: bytes


class DetokOutbox:
    """Send step records to the detokenizer, and replay what it or a client has missed."""

    def __init__(self, detok: Sender) -> None:
        self._detok = detok
        self._session = 0
        self._unacknowledged: dict[int, Request] = {}
        self._acknowledged: OrderedDict[int, AcknowledgedEnd] = OrderedDict()
        self._acknowledged_bytes = 0
        self._replaying: set[int] = set()
        # Numbers of the ended choices of a request, by their indexes.
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
            self._detok.send(events.to_detok(now, num_waiting, wait_s, self._session, news))

    # --- ends -------------------------------------------------------------------------------------

    @property
    def all_acknowledged(self) -> bool:
        """Whether the frontend has every end, and every replay of one."""
        return not self._unacknowledged and not self._replaying

    def finish(self, request: Request) -> None:
        """Keep a request that has ended until its end is acknowledged."""
        self._unacknowledged[request.seq] = request
        if _is_replayable(request):
            name = (request.client, request.request_id)
            self._ended.setdefault(name, {})[request.index] = request.seq

    def acknowledge(self, seqs: list[int]) -> None:
        """Take in that the frontend has these ends."""
        self._replaying.difference_update(seqs)
        for seq in seqs:
            request = self._unacknowledged.pop(seq, None)
            if request is not None and _is_replayable(request):
                self._remember(request)

    def _remember(self, request: Request) -> None:
        replay = _encode(stream_replay(request))
        name = (request.client, request.request_id)
        self._acknowledged[request.seq] = AcknowledgedEnd(
            name, request.index, request.received_at, replay
        )
        self._acknowledged_bytes += len(replay)
        while (
            len(self._acknowledged) > MAX_REMEMBERED
            or self._acknowledged_bytes > MAX_REMEMBERED_BYTES
        ):
            seq, oldest = self._acknowledged.popitem(last=False)
            self._acknowledged_bytes -= len(oldest.replay)
            self._replaying.discard(seq)
            ended = self._ended.get(oldest.name, {})
            if ended.get(oldest.choice) == seq:
                del ended[oldest.choice]
            if not ended:
                self._ended.pop(oldest.name, None)

    def ended_choices(self, client: bytes, request_id: str) -> dict[int, int]:
        """Return the numbers of a request's ended choices by index, as far as they are kept."""
        return dict(self._ended.get((client, request_id), {}))

    @property
    def replayable_names(self) -> Iterable[tuple[bytes, str]]:
        """Client and id of the ended requests that are kept."""
        return self._ended.keys()

    def has_ended(self, client: bytes, request_id: str, received_at: float) -> bool:
        """Return whether a choice of the request that was received at this time has ended."""
        return any(
            (self._unacknowledged.get(seq) or self._acknowledged[seq]).received_at == received_at
            for seq in self.ended_choices(client, request_id).values()
        )

    def forget_name(self, client: bytes, request_id: str) -> None:
        """Forget ended requests of this name: a new one begins."""
        self._ended.pop((client, request_id), None)

    # --- replays ----------------------------------------------------------------------------------

    def on_detok_restarted(self, session: int) -> None:
        """Address a new detokenizer from now on."""
        self._session = session

    @property
    def seqs_to_replay(self) -> list[int]:
        """Numbers of ended requests that a new detokenizer or frontend has to see again."""
        return [*self._unacknowledged, *self._replaying]

    def replays(self, live: Iterable[Request], ended: Iterable[int]) -> list[StreamReplay]:
        """Return the whole streams of live requests, and of ended ones by their numbers."""
        replays = [stream_replay(request) for request in live]
        for seq in ended:
            if seq in self._unacknowledged:
                replays.append(stream_replay(self._unacknowledged[seq]))
            else:
                self._replaying.add(seq)
                replay = _decode(self._acknowledged[seq].replay)
                opening = replay.opening.sent()
                replay = msgspec.structs.replace(replay, opening=opening)
                replays.append(cast("StreamReplay", replay))
        return replays


def _is_replayable(request: Request) -> bool:
    """Return whether a client that sends the request again gets its end.

    A request that was aborted because its client was lost, or that was refused, runs again.
    """
    refused = request.error is not None and request.error.code in REFUSALS
    return request.finish_reason is not FinishReason.ABORT and not refused
