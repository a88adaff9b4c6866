"""The detokenizer as the scheduler sees it: what it is told, and what it must be told again.

Another detokenizer knows nothing, and what was on its way to or from the one that died is lost. So
a request that has ended is kept until the front door has its end, and then a while longer, for
clients whose connection was lost.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import NamedTuple

import msgspec

from quadriga.errors import QueueFull, ServerStopping
from quadriga.wire.messages.arrays import pack_ids
from quadriga.wire.messages.to_detok import StreamReplay
from quadriga.wire.messages.to_scheduler import DetokReady
from scheduler_proc.durability.step_output import Sender, StepOutputBuilder, close_text, open_text
from scheduler_proc.state.request import Request

REFUSALS = (QueueFull.code, ServerStopping.code)
MAX_REMEMBERED = 4096
MAX_REMEMBERED_BYTES = 1 << 26
"""Requests whose end was handed on are remembered as far as these reach."""

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(StreamReplay).decode


class Remembered(NamedTuple):
    """A request that has ended, as its client would be told of it: encoded, which takes a fraction
    of the memory."""

    name: tuple[bytes, str]
    received: float
    replay: bytes


class DetokOutbox:
    """output: what the present round has for the detokenizer. clock: Unix seconds."""

    def __init__(self, link: Sender, clock: Callable[[], float]) -> None:
        self.output = StepOutputBuilder()
        self._link = link
        self._clock = clock
        self._session = 0
        self._unsettled: dict[int, Request] = {}
        self._remembered: OrderedDict[int, Remembered] = OrderedDict()
        self._remembered_bytes = 0
        self._asked: set[int] = set()
        self._numbers: dict[tuple[bytes, str], list[int]] = {}

    @property
    def settled(self) -> bool:
        """Every end has been handed on."""
        return not self._unsettled and not self._asked

    def flush(self, waiting: int) -> None:
        """Send what there is. waiting: requests in the waiting queue."""
        if not self.output.is_empty:
            self._link.send(self.output.to_message(self._clock, waiting, self._session))
            self.output = StepOutputBuilder()

    # --- ends -------------------------------------------------------------------------------------

    def close(self, request: Request) -> None:
        """It has ended; its reason is set."""
        self.output.closed.append(close_text(request))
        self._keep(request)

    def recall(self, request: Request, settled: bool) -> None:
        """It ended at another scheduler. settled: its end was handed on."""
        self._keep(request)
        if settled:
            self.settle([request.seq])

    def _keep(self, request: Request) -> None:
        self._unsettled[request.seq] = request
        if _is_remembered(request):
            self._numbers.setdefault((request.client, request.request_id), []).append(request.seq)

    def settle(self, seqs: list[int]) -> None:
        """The front door has these ends."""
        self._asked.difference_update(seqs)
        for seq in seqs:
            request = self._unsettled.pop(seq, None)
            if request is not None and _is_remembered(request):
                self._remember(request)

    def _remember(self, request: Request) -> None:
        replay = _encode(replay_text(request))
        name = (request.client, request.request_id)
        self._remembered[request.seq] = Remembered(name, request.received, replay)
        self._remembered_bytes += len(replay)
        while (
            len(self._remembered) > MAX_REMEMBERED or self._remembered_bytes > MAX_REMEMBERED_BYTES
        ):
            seq, forgotten = self._remembered.popitem(last=False)
            self._remembered_bytes -= len(forgotten.replay)
            self._asked.discard(seq)
            if seq in (numbers := self._numbers.get(forgotten.name, [])):
                numbers.remove(seq)
            if not numbers:
                self._numbers.pop(forgotten.name, None)

    def ended(self, client: bytes, request_id: str) -> list[int]:
        """The numbers of a request's choices that have ended, as far as they are remembered."""
        return list(self._numbers.get((client, request_id), ()))

    def has_ended(self, client: bytes, request_id: str, received: float) -> bool:
        """Whether one did of the request that came at this time."""
        known = (
            self._unsettled.get(n) or self._remembered[n] for n in self.ended(client, request_id)
        )
        return any(one.received == received for one in known)

    def begins(self, client: bytes, request_id: str) -> None:
        """A request of this name: nobody asks any more for what ended under it before."""
        self._numbers.pop((client, request_id), None)

    # --- again ------------------------------------------------------------------------------------

    def take_detok(self, ready: DetokReady, live: Iterable[Request], waiting: int) -> None:
        """A detokenizer is there, the first one or another. What was not sent yet goes with the
        rest: `live` requests as far as they have come, and the ends that were not handed on. Of a
        request without a token its client may know one all the same, which a scheduler that died
        had told and not written down: it hears that the telling begins anew. And whoever had asked
        for his requests, while no detokenizer was there, is answered."""
        self.output = StepOutputBuilder()
        self._session = ready.session
        self.tell(live, [*self._unsettled, *self._asked], waiting)

    def tell_ends(self, waiting: int) -> None:
        """Those that were not handed on, once more: a front door has died."""
        self.tell([], [*self._unsettled, *self._asked], waiting)

    def tell(self, live: Iterable[Request], ended: list[int], waiting: int) -> None:
        """All that there is of these requests, from their first token on. ended: by number."""
        self.flush(waiting)
        self.output.replayed += [replay_text(request) for request in live]
        for seq in ended:
            if seq in self._unsettled:
                self.output.replayed.append(replay_text(self._unsettled[seq]))
            else:
                self._asked.add(seq)
                self.output.replayed.append(_decode(self._remembered[seq].replay))
        self.flush(waiting)


def _is_remembered(request: Request) -> bool:
    """Return whether a client that sends a request again is given its end. One that was aborted
    when its client was lost begins anew, and one that was refused is tried again."""
    refused = request.error is not None and request.error.code in REFUSALS
    return request.finish_reason != "abort" and not refused


def replay_text(request: Request) -> StreamReplay:
    """All that there is of a request up to now."""
    return StreamReplay(
        opening=open_text(request),
        token_ids=pack_ids(request.tokens[request.num_prompt :]),
        logprobs=request.told,
        closing=close_text(request) if request.finished else None,
    )
