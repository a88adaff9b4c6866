"""A session with a server: the connection, and what is open on it."""

import asyncio
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quadriga.client.connection.connection import CLOSED_BY_CALLER, Connection, ConnectionEvents
from quadriga.client.connection.http_port import check_endpoint
from quadriga.client.inflight import InflightRequests
from quadriga.client.live.subscription import LiveSubscriptions
from quadriga.client.types import is_time_limit
from quadriga.config.frontend_args import DEFAULT_ENDPOINT
from quadriga.errors import DeadlineExceeded, QuadrigaError, ServerFailed, ServerStopping
from quadriga.wire.messages.from_client import PROTOCOL_VERSION, Abort, ClientMessage
from quadriga.wire.messages.live import LiveServer, LiveStep
from quadriga.wire.messages.to_client import ErrorInfo, Refused, ServerGone, ServerMessage

if TYPE_CHECKING:
    from typing_extensions import Self


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
    ) -> None:
        check_endpoint(endpoint)
        self.endpoint = endpoint
        self._connect_timeout = connect_timeout
        self._identity = identity or uuid.uuid4()
        self._counter = 0
        self._inflight = InflightRequests(
            lambda message: self._connection.send(message), reconnect_timeout
        )
        self._live = LiveSubscriptions(lambda message: self._connection.send(message))
        events = ConnectionEvents(
            on_message=self._on_message,
            on_interrupt=self._inflight.interrupt,
            on_reconnect=self._inflight.resend,
            on_lost=self._fail_all,
        )
        keys = Path(curve_dir) if curve_dir else None
        self._connection = Connection(endpoint, self._identity, events, reconnect_timeout, keys)

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
        """
        await self._connection.open(self._connect_timeout)

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
