"""The public socket: takes requests in, hands results out, and keeps no state of a request.

What it does keep: which clients are there (to tell them when the server ends, and to notice when
they go), and the requests that are being encoded at this moment.
"""

import asyncio
import logging
import time
import uuid
from array import array
from collections.abc import Callable

from quadriga.config import FrontDoorArgs, ServerConfig
from quadriga.errors import InvalidRequest, QuadrigaError, ServerStopping, SlowReader
from quadriga.grammar import grammar_of, without_grammar
from quadriga.messages.grammar import GrammarForm
from quadriga.messages.ids import pack_ids
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
    Probe,
    Refused,
    ServerGone,
    Text,
    Tokenize,
    Tokens,
)
from quadriga.messages.to_scheduler import AbortRequest, Drain, Inspect, Submit
from quadriga.model_source import ModelFiles
from quadriga.sockets import AsyncPort, Outbox, Unreachable, encode
from quadriga.stop_regex import compile_stop_regex
from tokenizer_proc import requests
from tokenizer_proc.chat import ChatTemplate
from tokenizer_proc.encode import Encoder
from tokenizer_proc.grammars import GrammarDoor
from tokenizer_proc.sampling_defaults import sampling_defaults

PROBE_DELAYS = (0.05, 0.5)
"""Seconds after a lost connection at which the clients are probed: the first is nearly always
enough, the second covers a connection that libzmq had not yet taken down."""
CUT_OFF_RETRY = 1.0
"""Seconds between attempts to tell a client that it was cut off."""

_PROBE = encode(Probe())


class FrontDoor:
    """Requests in, results out. `ended` is set when the last result has been handed over."""

    def __init__(
        self,
        args: FrontDoorArgs,
        model: ModelFiles,
        encoder: Encoder,
        scheduler: Outbox,
        facts: InfoValues,
    ) -> None:
        self._args = args
        self._model = model
        self._encoder = encoder
        self._scheduler = scheduler
        self._facts = facts
        self._defaults = sampling_defaults(args.sampling_defaults, model.generation_config)
        self._grammars = GrammarDoor(model)
        self._instance = uuid.uuid4().hex
        self._port: AsyncPort | None = None
        self._clients: set[bytes] = set()
        self._cut_off: set[bytes] = set()
        self._encoding: dict[tuple[bytes, str], bool] = {}  # value: aborted meanwhile
        self._draining = False
        self.ended = asyncio.Event()

    def open(self, port: AsyncPort) -> None:
        self._port = port

    # --- in ---------------------------------------------------------------------------------------

    def on_public(self, frames: list[bytes]) -> None:
        """A message of a client: [address, message]."""
        client, payload = frames[0], frames[1:]
        self._clients.add(client)
        try:
            message = requests.parse(payload)
            match message:
                case Generate():
                    self._generate(client, message)
                case Abort():
                    self._abort(client, message.request_id)
                case Ping():
                    pong = Pong(PROTOCOL_VERSION, self._instance, MAX_FRAME_BYTES)
                    self._deliver(client, encode(pong))
                case GetInfo():
                    self._scheduler.send(Inspect(client, message.request_id, self._facts))
                case FlushCache():
                    inspect = Inspect(client, message.request_id, self._facts, flush_cache=True)
                    self._scheduler.send(inspect)
                case Tokenize() | Detokenize():
                    self._convert(client, message)
        except QuadrigaError as error:
            self._refuse(client, requests.salvage_request_id(payload), error)

    def _generate(self, client: bytes, message: Generate) -> None:
        received = time.time()
        if self._draining:
            raise ServerStopping("the server is stopping and takes no new requests")
        requests.check_request_id(message.request_id)
        requests.check_urgency(message)
        message.params.validate(self._model.vocab_size)
        for pattern in message.params.stop_regexes:
            compile_stop_regex(pattern)
        grammar = grammar_of(message.params)
        if message.prompt_token_ids is not None and grammar is None:
            ids = requests.check_prompt_ids(message, self._model.vocab_size)
            self._submit(client, message, ids, received)
            return
        if grammar is not None:
            requests.check_can_end(message.params, self._model)
        self._encoding[client, message.request_id] = False
        if grammar is None:
            self._encode(client, message, received)
        else:
            self._grammars.check(
                grammar, lambda future: self._grammar_checked(client, message, received, future)
            )

    def _grammar_checked(
        self, client: bytes, message: Generate, received: float, form: "asyncio.Future[str]"
    ) -> None:
        try:
            grammar = GrammarForm.of(form.result())
        except QuadrigaError as error:
            self._encoding.pop((client, message.request_id), None)
            self._refuse(client, message.request_id, error)
            self._pass_drain_on()
        else:
            self._encode(client, message, received, grammar)

    def _encode(
        self,
        client: bytes,
        message: Generate,
        received: float,
        grammar: GrammarForm | None = None,
    ) -> None:
        def then(future: "asyncio.Future[array[int]]") -> None:
            self._encoded(client, message, received, future, grammar)

        if message.prompt_token_ids is None:
            self._encoder.encode(message.prompt, message.chat, then)
        else:
            vocab_size = self._model.vocab_size
            self._encoder.take(lambda: requests.check_prompt_ids(message, vocab_size), then)

    def _encoded(
        self,
        client: bytes,
        message: Generate,
        received: float,
        ids: "asyncio.Future[array[int]]",
        grammar: GrammarForm | None,
    ) -> None:
        aborted = self._encoding.pop((client, message.request_id), False)
        try:
            self._submit(client, message, ids.result(), received, grammar)
            if aborted:
                self._scheduler.send(AbortRequest(client, message.request_id))
        except QuadrigaError as error:
            self._refuse(client, message.request_id, error)
        except Exception as error:
            logging.exception("encoding failed")
            refusal = InvalidRequest(f"prompt cannot be encoded: {error}", "prompt")
            self._refuse(client, message.request_id, refusal)
        self._pass_drain_on()

    def _submit(
        self,
        client: bytes,
        message: Generate,
        ids: "array[int]",
        received: float,
        grammar: GrammarForm | None = None,
    ) -> None:
        args, truncate = self._args, message.truncate_prompt
        if truncate is None:
            truncate = args.allow_auto_truncate
        params = message.params.filled(self._defaults)
        ids, params = requests.fit(ids, params, self._model, truncate, message.clamp_max_new_tokens)
        if grammar is not None:
            params = without_grammar(params)
        self._scheduler.send(
            Submit(
                client=client,
                request_id=message.request_id,
                prompt_ids=pack_ids(ids),
                params=params,
                stream=message.stream,
                received=received,
                tokenized=time.time(),
                priority=message.priority,
                queue_deadline=requests.deadline(
                    received, message.queue_timeout, args.queue_timeout
                ),
                deadline=requests.deadline(received, message.timeout, args.request_timeout),
                bad_words=self._encoder.bad_words(params.bad_words) if params.bad_words else [],
                grammar=grammar,
            )
        )

    def _convert(self, client: bytes, message: Tokenize | Detokenize) -> None:
        """Text to ids or back, for who wants to know."""
        requests.check_request_id(message.request_id)
        if isinstance(message, Tokenize):
            self._encoder.encode(
                message.prompt,
                message.chat,
                lambda future: self._converted(
                    client,
                    message.request_id,
                    lambda: Tokens(message.request_id, pack_ids(future.result())),
                ),
            )
        else:
            ids = requests.check_ids(message.token_ids, "token_ids", self._model.vocab_size)
            self._encoder.decode(
                ids,
                message.skip_special_tokens,
                lambda future: self._converted(
                    client,
                    message.request_id,
                    lambda: Text(message.request_id, future.result()),
                ),
            )

    def _converted(
        self, client: bytes, request_id: str, answer: Callable[[], Tokens | Text]
    ) -> None:
        try:
            self._deliver(client, encode(answer()))
        except QuadrigaError as error:
            self._refuse(client, request_id, error)
        except Exception as error:
            logging.exception("encoding failed")
            self._refuse(client, request_id, InvalidRequest(f"cannot be converted: {error}"))

    def _abort(self, client: bytes, request_id: str) -> None:
        for key in self._encoding:
            if key[0] == client and request_id in ("", key[1]):
                self._encoding[key] = True
        self._scheduler.send(AbortRequest(client, request_id))

    def _refuse(self, client: bytes, request_id: str, error: QuadrigaError) -> None:
        info = ErrorInfo(error.code, str(error), getattr(error, "field", ""))
        self._deliver(client, encode(Refused(request_id, info)))

    # --- out --------------------------------------------------------------------------------------

    def on_delivery(self, frames: list[bytes]) -> None:
        """A result from the detokenizer: [address, message], ready to send; two empty: the end."""
        client, payload = frames
        if client:
            self._deliver(client, payload)
        else:
            self.ended.set()

    def _deliver(self, client: bytes, payload: bytes) -> None:
        assert self._port is not None
        if client in self._cut_off:
            return
        try:
            if not self._port.send(client, payload):
                self._cut_slow_reader_off(client)
        except Unreachable:
            self._client_is_gone(client)

    def _client_is_gone(self, client: bytes) -> None:
        self._clients.discard(client)
        self._cut_off.discard(client)
        self._abort(client, "")

    def _cut_slow_reader_off(self, client: bytes) -> None:
        logging.warning("a client does not read its results: cut off")
        self._cut_off.add(client)
        self._abort(client, "")
        self._tell_cut_off(client)

    def _tell_cut_off(self, client: bytes) -> None:
        """Try until the client reads again: what was lost must not look like silence."""
        assert self._port is not None
        if client not in self._cut_off:
            return
        error = SlowReader("results were not read fast enough; all open requests were aborted")
        try:
            told = self._port.send(client, _server_gone(error))
        except Unreachable:
            self._client_is_gone(client)
            return
        if told:
            self._cut_off.discard(client)
        else:
            asyncio.get_running_loop().call_later(CUT_OFF_RETRY, self._tell_cut_off, client)

    # --- who is there -----------------------------------------------------------------------------

    def on_disconnect(self) -> None:
        """Some connection was lost: find out whose."""
        for delay in PROBE_DELAYS:
            asyncio.get_running_loop().call_later(delay, self._probe_clients)

    def _probe_clients(self) -> None:
        for client in list(self._clients - self._cut_off):
            self._deliver(client, _PROBE)

    def tell_all(self, error: QuadrigaError) -> None:
        """The server ends: each client's open requests end with this error."""
        for client in list(self._clients):
            self._deliver(client, _server_gone(error))

    # --- the end ----------------------------------------------------------------------------------

    def drain(self) -> None:
        """Take no new requests; what was accepted goes on."""
        self._draining = True
        self._pass_drain_on()

    def _pass_drain_on(self) -> None:
        if self._draining and not self._encoding:
            self._scheduler.send(Drain())


def _server_gone(error: QuadrigaError) -> bytes:
    return encode(ServerGone(ErrorInfo(error.code, str(error))))


def facts_of(
    config: ServerConfig, model: ModelFiles, chat: ChatTemplate, pids: dict[str, int]
) -> InfoValues:
    """What the front door contributes to Info: how the server was started."""
    return {
        "protocol": PROTOCOL_VERSION,
        "model": config.model.shown_name,
        "context_length": model.context_length,
        "vocab_size": model.vocab_size,
        "max_frame_bytes": MAX_FRAME_BYTES,
        "max_batch_size": config.scheduler.max_batch_size,
        "prefill_max_batch_size": config.scheduler.prefill_width,
        "max_running_requests": config.scheduler.max_running_requests,
        "max_queued_requests": config.scheduler.max_queued_requests,
        "chat": chat.exists,
        "tool_format": chat.tool_format,
        "tokenize_workers": config.front_door.tokenize_workers,
        "stream_interval": config.detok.stream_interval,
        "pids": dict(pids),
    }
