"""The public socket: takes requests in and hands results out.

Requests go through intake.py. Whatever takes time that grows with a message is done elsewhere: by
the workers of pool.py and grammars.py.
"""

import asyncio
import uuid
from functools import partial

import msgspec

from quadriga.config.server_config import FrontendArgs
from quadriga.errors import InvalidRequest, QuadrigaError, ServerStopping
from quadriga.wire.messages.public import (
    MAX_FRAME_BYTES,
    PROTOCOL_VERSION,
    Abort,
    Detokenize,
    FlushCache,
    Generate,
    GetInfo,
    InfoValues,
    Ping,
    Pong,
    Tokenize,
)
from quadriga.wire.messages.to_detok import Delivered
from quadriga.wire.messages.to_scheduler import (
    EndsDelivered,
    FrontendRestarted,
    InfoRequest,
    Shutdown,
)
from quadriga.wire.sockets import AsyncPort, Outbox
from tokenizer_proc.clients import Clients
from tokenizer_proc.grammars.validator import GrammarValidator
from tokenizer_proc.info_requests import InfoRequests
from tokenizer_proc.intake import RequestIntake
from tokenizer_proc.overload import OverloadGuard
from tokenizer_proc.preparation import validation as requests
from tokenizer_proc.preparation.pool import PreparePool
from tokenizer_proc.preparation.prepare import MAX_INLINE_BYTES, Preparer

RETURN_SECONDS = 2.0
"""In which clients of a front door that died ask the next one for what they have open. They try to
connect many times a second."""
PREPARED_TAGS = ("generate", "tokenize", "detokenize")
"""Messages that may be long."""


class Frontend:
    """Requests in, results out. `ended` is set when the last result has been handed over.

    Args:
        facts: of the server's start, for Info.
        replaces: a front door before this one has died, and its clients come back.
    """

    def __init__(
        self,
        args: FrontendArgs,
        load: OverloadGuard,
        preparer: Preparer,
        pool: PreparePool,
        grammars: GrammarValidator,
        scheduler: Outbox,
        facts: InfoValues,
        replaces: bool = False,
    ) -> None:
        self._load = load
        self._preparer = preparer
        self._pool = pool
        self._scheduler = scheduler
        self._facts = facts
        self._replaces = replaces
        self._instance = uuid.uuid4().hex
        self._inspections = InfoRequests()
        self.clients = Clients(self._client_is_lost)
        self.intake = RequestIntake(
            args, load, preparer, pool, grammars, scheduler, self.clients, replaces
        )
        self.ended = asyncio.Event()

    def open(self, port: AsyncPort) -> None:
        self.clients.open(port)
        if self._replaces:
            self._scheduler.send(FrontendRestarted())
            loop = asyncio.get_running_loop()
            loop.call_later(RETURN_SECONDS, self.intake.clients_are_back)

    # --- in ---------------------------------------------------------------------------------------

    def on_public(self, frames: list[bytes]) -> None:
        """Take a client's message: [address, message]."""
        client, payload = frames[0], frames[1:]
        self.clients.saw(client)
        try:
            frame = requests.only_frame(payload)
            if len(frame) > MAX_INLINE_BYTES:
                self._take_long_message(client, frame)
            else:
                self._take_message(client, frame)
        except QuadrigaError as error:
            request_id = requests.peek(payload[0]).request_id if payload else ""
            self.clients.refuse(client, request_id, error)

    def _take_message(self, client: bytes, frame: bytes) -> None:
        message = requests.parse([frame])
        match message:
            case Generate():
                self.intake.generate(client, frame, message)
            case Abort():
                self.intake.abort(client, message.request_id)
            case Ping():
                self.clients.answer(client, Pong(PROTOCOL_VERSION, self._instance, MAX_FRAME_BYTES))
            case GetInfo() | FlushCache():
                self._inspect(client, message.request_id, isinstance(message, FlushCache))
            case Tokenize() | Detokenize():
                self.clients.answer(client, self._preparer.convert(message))

    def _take_long_message(self, client: bytes, frame: bytes) -> None:
        tag, _ = requests.peek(frame)
        if not tag:
            raise InvalidRequest("unreadable message: it has no tag; see docs/protocol.md")
        if tag not in PREPARED_TAGS:
            raise InvalidRequest(
                f"the message is {len(frame)} bytes: one of this kind has at most"
                f" {MAX_INLINE_BYTES}; see docs/protocol.md"
            )
        if tag == "generate":
            self.intake.generate(client, frame, None)
        else:
            self._pool.submit(client, frame, partial(self.clients.deliver, client))

    def _inspect(self, client: bytes, request_id: str, flush_cache: bool) -> None:
        requests.check_request_id(request_id)
        self._inspections.begin(client)
        now = {"refused": self.clients.num_refused, "open_requests": self.intake.num_open}
        facts: InfoValues = {**self._facts, **now}
        self._scheduler.send(InfoRequest(client, request_id, facts, flush_cache))

    def _client_is_lost(self, client: bytes) -> None:
        self._inspections.forget(client)
        self.intake.lose(client)

    # --- out --------------------------------------------------------------------------------------

    def on_delivery(self, frames: list[bytes]) -> None:
        """Take a result from the detokenizer: [address, message, Delivered]; all empty: all is
        told."""
        client, payload, told = frames
        if not client:
            self._all_is_told()
            return
        delivered = _decode_delivered(told)
        if delivered.waiting is not None:
            self._load.report(delivered.waiting)
        if delivered.ended:
            self.intake.ended(client, delivered.ended)
        if delivered.settled:
            self._scheduler.send(EndsDelivered(delivered.settled))
        if delivered.inspected:
            self._inspections.end(client)
        self.clients.deliver(client, payload)

    def _all_is_told(self) -> None:
        """As the answer to a Drain; one that a front door before had asked for says nothing of the
        clients that are still to come back."""
        if self.intake.has_drained:
            self.clients.tell_all(ServerStopping("the server has stopped"))
            self._scheduler.send(Shutdown())
            self.ended.set()


_decode_delivered = msgspec.msgpack.Decoder(Delivered).decode
