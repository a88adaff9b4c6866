"""The public socket: takes requests in, hands results out, and keeps no state of a request.

What it does keep: who is there (clients.py), which requests are open, as they were sent to the
scheduler (outstanding.py), and how much is waiting and being encoded (load.py).
"""

import asyncio
import logging
import uuid
from array import array
from collections.abc import Callable

import msgspec

from quadriga import clock
from quadriga.config import FrontDoorArgs
from quadriga.errors import InvalidRequest, QuadrigaError, ServerStopping
from quadriga.grammar import grammar_of
from quadriga.messages.grammar import GrammarForm
from quadriga.messages.public import (
    MAX_FRAME_BYTES,
    PROTOCOL_VERSION,
    Abort,
    Detokenize,
    ErrorInfo,
    FlushCache,
    Generate,
    GetInfo,
    InfoValues,
    Ping,
    Pong,
    Refused,
    Tokenize,
)
from quadriga.messages.to_detok import Delivered
from quadriga.messages.to_scheduler import (
    CLIENT,
    CLIENT_LOST,
    Drain,
    Inspect,
    Leave,
    NewFrontDoor,
    TextsEnded,
)
from quadriga.model_source import ModelFiles
from quadriga.sockets import AsyncPort, Outbox, encode
from quadriga.stop_regex import compile_stop_regex
from tokenizer_proc import requests
from tokenizer_proc.clients import Clients
from tokenizer_proc.conversions import convert
from tokenizer_proc.encode import Encoder
from tokenizer_proc.grammars import GrammarDoor
from tokenizer_proc.load import Load
from tokenizer_proc.outstanding import Outstanding
from tokenizer_proc.submission import Arrival, Submissions

RETURN_SECONDS = 2.0
"""In which clients of a front door that died ask the next one for what they have open. They try to
connect many times a second."""


class FrontDoor:
    """Requests in, results out. `ended` is set when the last result has been handed over.

    max_queued: requests that may wait. again: in place of another one, whose clients come back.
    """

    def __init__(
        self,
        args: FrontDoorArgs,
        max_queued: int,
        model: ModelFiles,
        encoder: Encoder,
        scheduler: Outbox,
        facts: InfoValues,
        again: bool = False,
    ) -> None:
        self._model = model
        self._encoder = encoder
        self._scheduler = scheduler
        self._facts = facts
        self._submissions = Submissions(args, model, encoder)
        self._grammars = GrammarDoor(model)
        self._instance = uuid.uuid4().hex
        self._load = Load(max_queued, args.max_requests_per_client)
        self._outstanding = Outstanding(scheduler)
        self.clients = Clients(self._client_is_lost)
        self._refused = 0
        self._draining = False
        self._awaits_clients = again
        self._has_asked = False
        self.ended = asyncio.Event()

    def open(self, port: AsyncPort) -> None:
        self.clients.open(port)
        if self._awaits_clients:
            self._scheduler.send(NewFrontDoor())
            asyncio.get_running_loop().call_later(RETURN_SECONDS, self._clients_are_back)

    # --- in ---------------------------------------------------------------------------------------

    def on_public(self, frames: list[bytes]) -> None:
        """A message of a client: [address, message]."""
        client, payload = frames[0], frames[1:]
        self.clients.saw(client)
        try:
            message = requests.parse(payload)
            match message:
                case Generate():
                    self._generate(client, message, len(payload[0]))
                case Abort():
                    self._outstanding.abort(client, message.request_id, CLIENT)
                case Ping():
                    self._answer(client, Pong(PROTOCOL_VERSION, self._instance, MAX_FRAME_BYTES))
                case GetInfo():
                    self._inspect(client, message.request_id)
                case FlushCache():
                    self._inspect(client, message.request_id, flush_cache=True)
                case Tokenize() | Detokenize():
                    vocab_size = self._model.vocab_size
                    convert(
                        message, self._encoder, vocab_size, lambda said: self._answer(client, said)
                    )
        except QuadrigaError as error:
            self._refuse(client, requests.salvage_request_id(payload), error)

    def _generate(self, client: bytes, message: Generate, size: int) -> None:
        received, name, choices = clock.now(), message.request_id, message.params.n
        requests.check_request_id(name)
        under_way = self._outstanding.being_encoded(client, name)
        if under_way is not None:
            under_way.resent |= message.resent
            return
        requests.check_urgency(message)
        message.params.validate(self._model.vocab_size)
        if not message.resent:
            self._check_welcome(client, message, size)
        for pattern in message.params.stop_regexes:
            compile_stop_regex(pattern)
        grammar = grammar_of(message.params)
        if grammar is not None:
            requests.check_can_end(message.params, self._model)
        self._load.let_in(choices, size)
        opened = self._outstanding.let_in(client, name, choices, message.resent)
        arrival = Arrival(client, message, size, received, opened)
        if grammar is None:
            self._encode(arrival)
        else:
            self._grammars.check(
                grammar, lambda form: self._grammar_checked(arrival, form), message.resent
            )

    def _inspect(self, client: bytes, request_id: str, flush_cache: bool = False) -> None:
        now = {"refused": self._refused, "open_requests": len(self._outstanding)}
        facts: InfoValues = {**self._facts, **now}
        self._scheduler.send(Inspect(client, request_id, facts, flush_cache))

    def _check_welcome(self, client: bytes, message: Generate, size: int) -> None:
        """What was accepted once is not refused when it is sent again; everything else may be."""
        if self._draining:
            raise ServerStopping("the server is stopping and takes no new requests")
        self._load.check(self._outstanding.num_of(client), message.params.n, size)

    def _grammar_checked(self, arrival: Arrival, form: "asyncio.Future[str]") -> None:
        try:
            arrival.grammar = GrammarForm.of(form.result())
        except QuadrigaError as error:
            self._settle(arrival, error)
        else:
            self._encode(arrival)

    def _encode(self, arrival: Arrival) -> None:
        message, vocab_size = arrival.message, self._model.vocab_size
        if message.prompt_token_ids is not None:
            self._pass_on(arrival, lambda: requests.check_prompt_ids(message, vocab_size))
        else:
            self._encoder.encode(
                message.prompt, message.chat, lambda ids: self._pass_on(arrival, ids.result)
            )

    def _pass_on(self, arrival: Arrival, ids: "Callable[[], array[int]]") -> None:
        try:
            self._outstanding.submit(arrival.open, self._submissions.make(arrival, ids()))
        except QuadrigaError as error:
            self._settle(arrival, error)
        except Exception as error:
            logging.exception("encoding failed")
            self._settle(arrival, InvalidRequest(f"prompt cannot be encoded: {error}", "prompt"))
        else:
            self._settle(arrival)

    def _settle(self, arrival: Arrival, error: QuadrigaError | None = None) -> None:
        """A request went on to the scheduler, or is refused."""
        client, name = arrival.client, arrival.message.request_id
        self._load.worked_off(arrival.size)
        if error is not None and arrival.open.wanted:
            self._outstanding.refused(client, name, arrival.open)
            self._refuse(client, name, error)
        self._pass_drain_on()

    def _client_is_lost(self, client: bytes) -> None:
        self._outstanding.abort(client, "", CLIENT_LOST)
        self._outstanding.forget(client)

    # --- out --------------------------------------------------------------------------------------

    def on_delivery(self, frames: list[bytes]) -> None:
        """A result from the detokenizer: [address, message, Delivered]; all empty: all is told."""
        client, payload, told = frames
        if not client:
            self._all_is_told()
            return
        delivered = _decode_delivered(told)
        if delivered.waiting is not None:
            self._load.report(delivered.waiting)
        if delivered.ended:
            self._load.ended(len(delivered.ended))
            self._outstanding.ended(client, delivered.ended)
        if delivered.settled:
            self._scheduler.send(TextsEnded(delivered.settled))
        self.clients.deliver(client, payload)

    def _answer(self, client: bytes, message: msgspec.Struct) -> None:
        self.clients.deliver(client, encode(message))

    def _refuse(self, client: bytes, request_id: str, error: QuadrigaError) -> None:
        self._refused += 1
        self._answer(client, Refused(request_id, ErrorInfo.of(error)))

    # --- another scheduler ------------------------------------------------------------------------

    def scheduler_was_replaced(self) -> None:
        """It may not know of everything that the one before was sent."""
        self._scheduler.renew()
        self._outstanding.send_again()
        self._pass_drain_on()

    # --- the end ----------------------------------------------------------------------------------

    def drain(self) -> None:
        """Take no new requests; what was accepted goes on, and its clients may come back for it."""
        self._draining = True
        self._pass_drain_on()

    def _clients_are_back(self) -> None:
        self._awaits_clients = False
        self._pass_drain_on()

    def _pass_drain_on(self) -> None:
        if self._draining and self._load.idle and not self._awaits_clients:
            self._has_asked = True
            self._scheduler.send(Drain())

    def _all_is_told(self) -> None:
        """As the answer to a Drain; one that a front door before had asked for says nothing of the
        clients that are still to come back."""
        if self._has_asked:
            self.clients.tell_all(ServerStopping("the server has stopped"))
            self._scheduler.send(Leave())
            self.ended.set()


_decode_delivered = msgspec.msgpack.Decoder(Delivered).decode
