"""What the endpoints share: the ring's client, the facts of the server, and who is being served."""

import asyncio
import re
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

from aiohttp import web

from http_proc.observe.request_log import RECORD
from http_proc.observe.request_metrics import RequestMetrics
from http_proc.protocol.errors import ApiError, from_ring
from http_proc.request_group import RequestGroup
from quadriga.client.async_client import AsyncClient
from quadriga.config.server_config import ServerConfig
from quadriga.errors import QuadrigaError, ServerStopping

MAX_CHOICES = 1024
"""Choices of one web request: prompts times n."""
INFO_TIMEOUT = 2.0
"""Seconds in which the ring must answer a probe."""
PROBE_AGE = 0.5
"""Seconds for which the answer that the ring is ready holds for a probe: many probes are one
question."""
READY_POLL_S = 0.02
"""Between two questions, at the start, whether the ring is ready."""

_REQUEST_ID = re.compile(r"[\w.:-]{1,100}", re.ASCII)


class Head(NamedTuple):
    """What every piece of an answer has. created: Unix seconds."""

    id: str
    created: int
    model: str


class Gateway:
    """One web server's state. `ring` must be connected before requests come."""

    def __init__(self, config: ServerConfig, ring: AsyncClient) -> None:
        self.args = config.http
        self.model = config.model.shown_name
        self.ring = ring
        self.metrics = RequestMetrics()
        self.started = int(time.time())
        self.draining = False
        self.body_bytes = 0
        self._all_answered = asyncio.Event()
        self._all_answered.set()
        self._facts: dict[str, Any] = {}
        self._live: dict[str, RequestGroup] = {}
        self._asking: asyncio.Task[dict[str, Any]] | None = None
        self._asked_at = 0.0

    # --- requests ---------------------------------------------------------------------------------

    def head(self, request: web.Request, prefix: str) -> Head:
        """The id is made of the request's, so that either ends it at /abort_request."""
        name = request[RECORD].id = f"{prefix}-{request[REQUEST_ID]}"
        return Head(name, int(time.time()), self.model)

    def check_model(self, name: str | None) -> None:
        """404 for a model that is not served here."""
        if name is not None and name != self.model:
            raise ApiError(
                404,
                f"model {name!r} is not served here: use {self.model!r}",
                param="model",
                code="model_not_found",
            )

    @contextmanager
    def batch(self, rid: str, names: Mapping[str, str]) -> Iterator[RequestGroup]:
        """A batch that /abort_request finds by `rid`, and that ends with the `with` block.

        Errors of the ring leave it as ApiErrors, which call its fields by `names`.
        """
        if self.draining:
            error = ServerStopping("the server is stopping and takes no new requests")
            raise from_ring(error, names)
        while rid in self._live:
            rid += "+"
        batch = self._live[rid] = RequestGroup(self.ring, self.metrics.count_asked)
        self._all_answered.clear()
        try:
            with batch:
                yield batch
        except QuadrigaError as error:
            raise from_ring(error, names) from None
        except asyncio.CancelledError:
            self.metrics.disconnects += 1
            raise
        finally:
            del self._live[rid]
            if not self._live:
                self._all_answered.set()

    @property
    def live(self) -> int:
        """Web requests that are being answered."""
        return len(self._live)

    def is_live(self, rid: str) -> bool:
        return rid in self._live

    async def abort(self, rid: str | None) -> int:
        """End the requests of this id, or all: they end with `abort`. How many there were."""
        found = [batch for name, batch in self._live.items() if rid is None or _is(name, rid)]
        for batch in found:
            await batch.end()
        return len(found)

    def fail_all(self, error: QuadrigaError) -> None:
        """The ring will say nothing more, for this reason."""
        for batch in self._live.values():
            batch.fail(error)

    async def drain(self, patience: float) -> None:
        """Take nothing new, and answer what is open: wait until the ring has ended it, and then at
        most `patience` seconds for clients that read slowly."""
        self.draining = True
        for batch in list(self._live.values()):
            await batch.ended.wait()
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._all_answered.wait(), patience)

    # --- facts ------------------------------------------------------------------------------------

    async def facts(self) -> dict[str, Any]:
        """What does not change while the server runs."""
        if not self._facts.get("ready"):
            self._facts = await self.info()
        return self._facts

    async def info(self, most_age: float = 0.0) -> dict[str, Any]:
        """Return the ring's info, at most so many seconds old. Callers that come before an answer
        share it; one that does not say "ready" is used for no later caller. Raises what ended the
        ring, or DeadlineExceeded."""
        now = time.monotonic()
        asking = self._asking
        if asking is None or (
            asking.done() and (now - self._asked_at > most_age or not _says_ready(asking))
        ):
            self._asked_at = now
            asking = self._asking = asyncio.create_task(self.ring.info(INFO_TIMEOUT))
            asking.add_done_callback(_look_at)
        return await asyncio.shield(asking)

    async def until_ready(self) -> None:
        """Wait until the ring says that it can serve."""
        while True:
            with suppress(QuadrigaError):
                if (await self.info())["ready"]:
                    return
            await asyncio.sleep(READY_POLL_S)


REQUEST_ID = web.RequestKey("request_id", str)
GATEWAY = web.AppKey("gateway", Gateway)


def request_id(request: web.Request) -> str:
    """The client's X-Request-Id where it is a plain word, else a new one."""
    given = request.headers.get("X-Request-Id", "")
    return given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex


def _is(name: str, rid: str) -> bool:
    """rid: the id of an answer, or of its request without the answer's prefix."""
    name = name.rstrip("+")
    return name == rid or name.partition("-")[2] == rid


def _says_ready(task: "asyncio.Task[dict[str, Any]]") -> bool:
    return not task.cancelled() and task.exception() is None and bool(task.result()["ready"])


def _look_at(task: "asyncio.Task[dict[str, Any]]") -> None:
    """An answer that nobody waits for any more is no error."""
    if not task.cancelled():
        task.exception()
