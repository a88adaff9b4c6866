"""A session with a server: the connection, and the requests and questions that are open on it.

InflightRequests has what the server has not finished, and sends it again after a loss.
"""

import asyncio
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from quadriga.client.connection import (
    CLOSED_BY_CALLER,
    Connection,
    ConnectionEvents,
    check_endpoint,
)
from quadriga.client.live import LiveSubscriptions
from quadriga.client.request_handle import ChunkGap, RequestHandle
from quadriga.client.types import is_time_limit
from quadriga.clock import now
from quadriga.errors import (
    ConfigError,
    DeadlineExceeded,
    InvalidRequest,
    QuadrigaError,
    ServerFailed,
    ServerStopping,
)
from quadriga.wire.client import (
    DEFAULT_ENDPOINT,
    PROTOCOL_VERSION,
    Abort,
    Accepted,
    AdapterUsed,
    AnyErrorInfo,
    Chunk,
    Chunks,
    ClientMessage,
    ErrorInfo,
    GetInfo,
    Info,
    InfoValues,
    ProgressAnswer,
    RefusalInfo,
    Refused,
    Replay,
    ServerGone,
    ServerMessage,
    Text,
    Tokens,
    Traces,
)
from quadriga.wire.live import LiveServer, LiveStep

if TYPE_CHECKING:
    from typing_extensions import Self


class InflightRequests:
    """Passes each message of the server to the request or question that it belongs to.

    A message that cannot be sent now is sent by `resend`, when the server is back, or failed by
    `fail_all`.

    Args:
        send: sends a message; returns False if it cannot be sent now.
        retry_timeout: seconds during which a request that was accepted before is sent again to a
            server that has no room for it.
    """

    def __init__(self, send: Callable[[msgspec.Struct], bool], retry_timeout: float) -> None:
        self._send = send
        self._retry_timeout = retry_timeout
        self._handles: dict[str, RequestHandle] = {}
        self._questions: dict[str, tuple[ClientMessage, asyncio.Future[Any]]] = {}
        self._unsent_aborts: list[str] = []
        self._was_interrupted = False

    @property
    def has_requests(self) -> bool:
        """Whether a request is under way."""
        return bool(self._handles)

    def __len__(self) -> int:
        return len(self._handles) + len(self._questions)

    def add(self, handle: RequestHandle) -> None:
        """Send a request. Raise InvalidRequest if it is too large or cannot be encoded."""
        message = handle.message
        if handle.was_sent:
            message = msgspec.structs.replace(message, resent=True)
            handle.was_resent = True
        handle.was_sent |= self._send(message)
        self._handles[handle.request_id] = handle

    def drop(self, handle: RequestHandle) -> None:
        """Forget a request, and abort it at the server unless it has ended."""
        if self._handles.pop(handle.request_id, None) is not None and handle.was_sent:
            abort = Abort(PROTOCOL_VERSION, handle.request_id)
            if not self._send(abort):
                self._unsent_aborts.append(handle.request_id)

    def abort(self, request_id: str) -> None:
        """Abort a request, or all of them if the id is empty.

        The abort is repeated if the connection is lost before the request ends.
        """
        for handle in self._handles.values():
            handle.abort_requested |= request_id in ("", handle.request_id)
        self._send(Abort(PROTOCOL_VERSION, request_id))

    async def ask(self, name: str, question: ClientMessage) -> Any:
        """Send a question and wait for its answer. Raise the error that ends it."""
        answer = asyncio.get_running_loop().create_future()
        self._questions[name] = question, answer
        try:
            self._send(question)
            reply = await answer
        finally:
            del self._questions[name]
        if isinstance(reply, ErrorInfo | RefusalInfo):
            raise reply.exception()
        return reply

    def _answer(self, name: str, answer: "ServerMessage | AnyErrorInfo") -> None:
        _, waiting = self._questions.get(name, (None, None))
        if waiting is not None and not waiting.done():
            waiting.set_result(answer)

    # --- answers ----------------------------------------------------------------------------------

    def on_message(self, message: ServerMessage) -> None:
        """Handle a message; one for an unknown request is ignored."""
        match message:
            case Chunks():
                self._on_chunks(message.chunks, RequestHandle.on_chunk)
            case Replay():
                self._on_chunks(message.chunks, RequestHandle.on_replay)
            case Refused():
                self._on_refused(message)
            case Accepted():
                if (handle := self._handles.get(message.request_id)) is not None:
                    handle.accept(message)
            case AdapterUsed():
                if (handle := self._handles.get(message.request_id)) is not None:
                    handle.use_adapter(message.adapter)
            case Info() | Tokens() | Text() | ProgressAnswer() | Traces():
                self._answer(message.request_id, message)

    def _on_chunks(
        self, chunks: list[Chunk], handler: Callable[[RequestHandle, Chunk, float], None]
    ) -> None:
        received_at = now()
        for chunk in chunks:
            handle = self._handles.get(chunk.request_id)
            if handle is None:
                self._on_unknown_chunk(chunk)
                continue
            if chunk.end is not None and chunk.end.error is not None:
                error = chunk.end.error  # the scheduler may refuse what the frontend admitted
                if handle.retry_later(error, self._retry_timeout, self._resend):
                    continue
            try:
                handler(handle, chunk, received_at)
            except ChunkGap:
                handle.interrupt()
                self._resend(handle)
            self._forget_if_done(handle)

    def _on_unknown_chunk(self, chunk: Chunk) -> None:
        """Abort an unknown request, if its abort may have been lost with a connection."""
        if self._was_interrupted and chunk.end is None:
            self._send(Abort(PROTOCOL_VERSION, chunk.request_id))

    def _on_refused(self, message: Refused) -> None:
        self._answer(message.request_id, message.error)
        handle = self._handles.get(message.request_id)
        if handle is None or handle.retry_later(message.error, self._retry_timeout, self._resend):
            return
        handle.fail(message.error)
        self._forget_if_done(handle)

    def _forget_if_done(self, handle: RequestHandle) -> None:
        if handle.done:
            self._handles.pop(handle.request_id, None)

    def fail_all(self, error: AnyErrorInfo) -> None:
        """Fail every request and question."""
        self._unsent_aborts.clear()
        handles, self._handles = list(self._handles.values()), {}
        for handle in handles:
            handle.fail(error)
        for name in self._questions:
            self._answer(name, error)

    def forget_all(self) -> None:
        """Leave every request to the server, which does not get its abort."""
        self._handles.clear()
        self._unsent_aborts.clear()

    # --- a lost connection ------------------------------------------------------------------------

    def interrupt(self) -> None:
        """Handle a lost connection: messages of every request may be lost."""
        self._was_interrupted = True
        for handle in self._handles.values():
            if handle.was_sent:
                handle.interrupt()

    def resend(self) -> None:
        """Send every open request, question and abort again, to a server that is back."""
        for handle in list(self._handles.values()):
            self._resend(handle)
        for question, answer in self._questions.values():
            if not answer.done():
                self._send(question)
        aborts, self._unsent_aborts = self._unsent_aborts, []
        for request_id in aborts:
            self._send(Abort(PROTOCOL_VERSION, request_id))

    def _resend(self, handle: RequestHandle) -> None:
        """Send a request again, marked as a retry if the server may know it."""
        message = msgspec.structs.replace(handle.message, resent=handle.was_sent)
        try:
            handle.was_resent |= handle.was_sent
            handle.was_sent |= self._send(message)
        except InvalidRequest as error:  # a new server may have a smaller frame limit
            handle.fail(ErrorInfo.of(error))
            self._forget_if_done(handle)
            return
        if handle.abort_requested:
            self._send(Abort(PROTOCOL_VERSION, handle.request_id))


# Time in which a server says where its models are.
INFO_TIMEOUT_S = 10.0


def _endpoint_of(model: str, endpoint: str, info: InfoValues) -> str:
    """Return the endpoint of a model.

    Args:
        model: its name, or an alias.
        endpoint: that of the server, as the client reaches it.
        info: what the server says there.

    Raises:
        InvalidRequest: the server does not serve the model.
    """
    endpoints: dict[str, str] = info.get("models") or {}
    if not endpoints and model == info["model"]:
        return endpoint
    if model not in endpoints:
        names = ", ".join(map(repr, endpoints)) or repr(info["model"])
        raise InvalidRequest(f"model {model!r} is not served at {endpoint}: use {names}", "model")
    host, _, port = endpoints[model].rpartition(":")
    if not host.startswith("tcp://"):
        return endpoints[model]
    return f"{endpoint.rpartition(':')[0]}:{port}"  # the server's own host may be any


class ServerSession:
    """Keeps a connection to a server, and ends what is open when the server does.

    AsyncClient describes the arguments.
    """

    def __init__(
        self,
        endpoint: str = DEFAULT_ENDPOINT,
        connect_timeout: float = 5.0,
        reconnect_timeout: float = 30.0,
        curve_dir: str | Path | None = None,
        identity: uuid.UUID | None = None,
        model: str = "",
    ) -> None:
        check_endpoint(endpoint)
        if model and "," in endpoint:
            raise ConfigError(
                f"endpoint is {endpoint!r}: with model {model!r} it must be one address, of the"
                " server that says where its models are"
            )
        self.endpoint = endpoint
        self._connect_timeout = connect_timeout
        self._reconnect_timeout = reconnect_timeout
        self._keys = Path(curve_dir) if curve_dir else None
        self._model = model
        self._adapter = ""  # of every request, where `model` is one
        self._finding = asyncio.Lock()
        self._identity = identity or uuid.uuid4()
        self._counter = 0
        self._inflight = InflightRequests(
            lambda message: self._connection.send(message), reconnect_timeout
        )
        self._live = LiveSubscriptions(lambda message: self._connection.send(message))
        self._connection = self._connection_to(endpoint)

    def _connection_to(self, endpoint: str) -> Connection:
        events = ConnectionEvents(
            on_message=self._on_message,
            on_interrupt=self._inflight.interrupt,
            on_reconnect=self._inflight.resend,
            on_lost=self._fail_all,
        )
        return Connection(endpoint, self._identity, events, self._reconnect_timeout, self._keys)

    async def __aenter__(self) -> "Self":
        await self.connect()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def connect(self) -> None:
        """Connect to the server; every call does so first. Concurrent calls share one attempt.

            client = AsyncClient()
            await client.connect()

        Raises:
            ServerUnreachable: no answer within connect_timeout, or the connection was lost and the
                server is not back.
            RequestAborted: the client was closed meanwhile.
            InvalidRequest: the server does not serve the model that this client is for.
        """
        if self._model:
            async with self._finding:
                await self._turn_to_model()
        await self._connection.open(self._connect_timeout)

    async def _turn_to_model(self) -> None:
        """Ask the server where the client's model is, and connect there from now on."""
        if not self._model:  # found meanwhile
            return
        asker = ServerSession(self.endpoint, self._connect_timeout, curve_dir=self._keys)
        try:
            info = await asker._ask(lambda name: GetInfo(PROTOCOL_VERSION, name), INFO_TIMEOUT_S)
        finally:
            await asker.close()
        models, adapters = info.values.get("models") or {}, info.values.get("adapter_names", ())
        if self._model in adapters and self._model not in (info.values["model"], *models):
            self._adapter = self._model
        else:
            self.endpoint = _endpoint_of(self._model, self.endpoint, info.values)
        self._model = ""
        self._connection = self._connection_to(self.endpoint)

    async def _connect_within(self, timeout: float | None) -> None:
        """Connect, or raise DeadlineExceeded at the timeout of the call that needs it."""
        if self._connection.is_open or not is_time_limit(timeout):
            await self.connect()
            return
        try:
            await asyncio.wait_for(self.connect(), timeout)
        except asyncio.TimeoutError:
            raise DeadlineExceeded(
                f"not connected to {self.endpoint} within {timeout} s, the timeout of this call"
            ) from None

    async def close(self) -> None:
        """Abort all requests and disconnect: every open call raises RequestAborted.

        The next call connects again.

            await client.close()
        """
        if self._inflight.has_requests:
            self._connection.send(Abort(PROTOCOL_VERSION, ""))
        self._fail_all(CLOSED_BY_CALLER)
        await self._connection.close(linger_s=1)

    def leave_requests(self) -> None:
        """Leave every open request to a client of the same identity that comes after this one.

        They are not aborted, and nothing more comes of them here.

            client.leave_requests()
        """
        self._inflight.forget_all()

    async def give_up(self, error: QuadrigaError) -> None:
        """Fail every open and later call: the caller knows that the server has ended.

        A reason that the server has given itself is kept.

            await client.give_up(ServerFailed("the machine of the server was shut down"))

        Args:
            error: what the calls raise.
        """
        if not self._connection.is_lost:
            reason = ErrorInfo.of(error)
            self._connection.give_up(reason)
            self._fail_all(reason)

    async def _ask(self, question: Callable[[str], ClientMessage], timeout: float) -> Any:
        """Send a question and wait for its answer.

        Args:
            question: makes the question, given its name.
            timeout: seconds until DeadlineExceeded, connecting included.
        """
        name = f"ask-{self._counter}"
        self._counter += 1

        async def connect_and_ask() -> Any:
            await self.connect()
            return await self._inflight.ask(name, question(name))

        try:
            return await asyncio.wait_for(connect_and_ask(), timeout)
        except asyncio.TimeoutError:
            raise DeadlineExceeded(f"no answer from {self.endpoint} within {timeout} s") from None

    # --- messages ---------------------------------------------------------------------------------

    def _on_message(self, message: ServerMessage) -> None:
        if isinstance(message, LiveStep | LiveServer):
            self._live.on_message(message)
            return
        if not isinstance(message, ServerGone):
            if isinstance(message, Refused):
                self._live.on_refused(message)
            self._inflight.on_message(message)
            return
        if message.error.code in (ServerFailed.code, ServerStopping.code):
            self._connection.give_up(message.error)
        self._fail_all(message.error)

    def _fail_all(self, error: ErrorInfo) -> None:
        """End every open call with an error."""
        self._inflight.fail_all(error)
        self._live.fail(error)
