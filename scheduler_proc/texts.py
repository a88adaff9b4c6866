"""The detokenizer as the scheduler sees it: what it is told, and what it must be told again.

Another detokenizer knows nothing, and what was on its way to the one that died is lost. So a
request that has ended is kept until the detokenizer has handed its end on, and then a while longer,
for clients whose connection was lost.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import NamedTuple

import msgspec

from quadriga.messages.arrays import pack_ids
from quadriga.messages.to_detok import ReplayText
from quadriga.messages.to_scheduler import DetokReady
from scheduler_proc.output import Link, RoundOutput, close_text, open_text
from scheduler_proc.request import Request

MOST_REMEMBERED = 4096
MOST_REMEMBERED_BYTES = 1 << 26
"""Requests whose end was handed on are remembered as far as these reach."""

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(ReplayText).decode


class Remembered(NamedTuple):
    """A request that has ended, as its client would be told of it: encoded, which takes a fraction
    of the memory."""

    client: bytes
    request_id: str
    replay: bytes


class Texts:
    """output: what the present round has for the detokenizer. clock: Unix seconds."""

    def __init__(self, link: Link, clock: Callable[[], float]) -> None:
        self.output = RoundOutput()
        self._link = link
        self._clock = clock
        self._session = 0
        self._unsettled: dict[int, Request] = {}
        self._remembered: OrderedDict[int, Remembered] = OrderedDict()
        self._remembered_bytes = 0

    @property
    def settled(self) -> bool:
        """Every end has been handed on."""
        return not self._unsettled

    def flush(self, waiting: int) -> None:
        """Send what there is. waiting: requests in the waiting queue."""
        if not self.output.is_empty:
            self._link.send(self.output.to_message(self._clock, waiting, self._session))
            self.output = RoundOutput()

    # --- ends -------------------------------------------------------------------------------------

    def close(self, request: Request) -> None:
        """It has ended; its reason is set."""
        self.output.closed.append(close_text(request))
        self._unsettled[request.seq] = request

    def recall(self, request: Request, settled: bool) -> None:
        """It ended at another scheduler. settled: its end was handed on."""
        self._unsettled[request.seq] = request
        if settled:
            self.settle([request.seq])

    def settle(self, seqs: list[int]) -> None:
        """The detokenizer has handed these ends on. What was aborted when its client was lost is
        not wanted back as it was."""
        for seq in seqs:
            request = self._unsettled.pop(seq, None)
            if request is not None and request.finish_reason != "abort":
                self._remember(request)

    def _remember(self, request: Request) -> None:
        replay = _encode(replay_text(request, asked=True))
        self._remembered[request.seq] = Remembered(request.client, request.request_id, replay)
        self._remembered_bytes += len(replay)
        while (
            len(self._remembered) > MOST_REMEMBERED
            or self._remembered_bytes > MOST_REMEMBERED_BYTES
        ):
            _, forgotten = self._remembered.popitem(last=False)
            self._remembered_bytes -= len(forgotten.replay)

    def ended(self, client: bytes, request_id: str) -> list[ReplayText]:
        """The choices of a client's request that have ended, as far as they are remembered, as it
        is told of them again."""
        whose = (client, request_id)
        unsettled = [
            replay_text(request, asked=True)
            for request in self._unsettled.values()
            if (request.client, request.request_id) == whose and request.finish_reason != "abort"
        ]
        return unsettled + [
            _decode(one.replay)
            for one in self._remembered.values()
            if (one.client, one.request_id) == whose
        ]

    # --- again ------------------------------------------------------------------------------------

    def take_detok(self, ready: DetokReady, live: Iterable[Request], waiting: int) -> None:
        """A detokenizer is there, the first one or another. What was not sent yet goes with the
        rest: `live` requests as far as they have come, and the ends that were not handed on. Of a
        request without a token its client may know one all the same, which a scheduler that died
        had told and not written down: it hears that the telling begins anew."""
        self.output = RoundOutput()
        self._session = ready.session
        everything = [*live, *self._unsettled.values()]
        self.replay([replay_text(request, asked=False) for request in everything], waiting)

    def replay(self, told: list[ReplayText], waiting: int) -> None:
        """Tell these from their first token on."""
        self.flush(waiting)
        self.output.replayed += told
        self.flush(waiting)


def replay_text(request: Request, asked: bool) -> ReplayText:
    """All that there is of a request up to now. asked: its client wants to hear of it, whatever
    there is."""
    return ReplayText(
        opening=open_text(request),
        token_ids=pack_ids(request.tokens[request.num_prompt :]),
        logprobs=request.told,
        closing=close_text(request) if request.finished else None,
        asked=asked,
    )
