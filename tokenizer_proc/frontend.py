"""The frontend: dispatches the messages of the public socket and delivers results to clients.

Nothing here takes time that grows with a message: long messages are prepared by processes
(`intake/pool.py`), grammars are checked by others (`intake/grammar_validator.py`). What this
process knows of a request has one owner at a time: IncomingRequest in `intake/intake.py` until it
is submitted, then OpenRequests in `replicas/open_requests.py` until its last end. All else is the
scheduler's.
"""

import asyncio
import os
import uuid
from functools import partial

from quadriga.errors import InvalidRequest, QuadrigaError, RequestFailed, ServerStopping
from quadriga.server.config.frontend_args import TenantArgs, TraceArgs
from quadriga.server.model_aliases import AliasFile
from quadriga.server.processes.logs import log_exception
from quadriga.server.tenants import parent_name
from quadriga.server.tracing.export import NoExporter
from quadriga.wire.adapter import AdapterRef
from quadriga.wire.async_sockets import AsyncPort
from quadriga.wire.client import (
    MAX_FRAME_BYTES,
    MAX_PROGRESS_IDS,
    PROTOCOL_VERSION,
    Abort,
    Detokenize,
    FlushCache,
    Generate,
    GetInfo,
    GetProgress,
    GetTraces,
    InfoValues,
    Ping,
    Pong,
    ReleaseCache,
    Tokenize,
    Watch,
)
from quadriga.wire.to_scheduler import CacheRelease, InfoRequest, ProgressRequest, Shutdown
from tokenizer_proc.deliver import clients, live
from tokenizer_proc.deliver.traces import RingTraces
from tokenizer_proc.info import InfoRequests
from tokenizer_proc.intake import intake, overload, tenants
from tokenizer_proc.intake.adapters import Adapters
from tokenizer_proc.preparation import validation
from tokenizer_proc.preparation.prepare import MAX_INLINE_BYTES
from tokenizer_proc.replicas.placed import Name
from tokenizer_proc.replicas.replicas import ClientResult, Replicas

TAGS_OF_LONG_MESSAGES = ("generate", "tokenize", "detokenize")


class Frontend:
    """Take requests in and hand results out.

    Args:
        static_info: values of Info that do not change.
        replaces: a frontend before this one, of this run or of one that is resumed, has died, and
            its clients come back.
        logs_refusals: log why requests are refused.
        owners: finds the tenants of requests; None without tenants.
        traces: keeps the traces of requests; None: of those whose clients want them.
        aliases: names that were moved between the models of the server; None: it has one model.
        adapters: what requests can name; None: nothing.

    Attributes:
        ended: set when the last result has been handed over.
    """

    def __init__(
        self,
        preparation: intake.RequestPreparation,
        guard: overload.OverloadGuard,
        replicas: Replicas,
        static_info: InfoValues,
        replaces: bool = False,
        logs_refusals: bool = False,
        owners: tenants.RequestOwners | None = None,
        traces: RingTraces | None = None,
        num_replicas: int = 1,
        aliases: AliasFile | None = None,
        adapters: Adapters | None = None,
    ) -> None:
        self._aliases = aliases
        self._adapters = adapters or Adapters(None, replicas)
        self.traces = traces or RingTraces(TraceArgs(), NoExporter())
        self._owners = owners or tenants.RequestOwners(TenantArgs())
        self._preparation = preparation
        self._guard = guard
        self._replicas = replicas
        self._static_info = static_info
        self._instance = uuid.uuid4().hex
        self._info_requests = InfoRequests()
        self.clients = clients.Clients(self._on_client_lost, logs_refusals)
        self.intake = intake.RequestIntake(
            preparation, guard, replicas, self.clients, replaces, self._owners, self.traces,
            self._adapters,
        )  # fmt: skip
        usage = live.ProcessUsage(os.getppid())
        self._viewers = live.Viewers(
            replicas, self.clients, usage, lambda: self.intake.num_open, num_replicas
        )
        self.ended = asyncio.Event()

    def open(self, port: AsyncPort) -> None:
        """Send through this port from now on."""
        self.clients.open(port)
        self.intake.start()

    # --- messages of clients ----------------------------------------------------------------------

    def on_public(self, frames: list[bytes]) -> None:
        """Take a client's message: [address, message]."""
        client, payload = frames[0], frames[1:]
        self.clients.mark_seen(client)
        try:
            frame = validation.only_frame(payload)
            if len(frame) > MAX_INLINE_BYTES:
                self._take_long_message(client, frame)
            else:
                self._take_message(client, frame)
        except QuadrigaError as error:
            self._refuse(client, payload, error)
        except Exception:  # a fault of this process: the client gets an answer, and no other waits
            log_exception()
            failed = RequestFailed("the server failed on this message; its log says why")
            self._refuse(client, payload, failed)

    def _refuse(self, client: bytes, payload: list[bytes], error: QuadrigaError) -> None:
        request_id = validation.peek(payload[0]).request_id if payload else ""
        self.clients.refuse(client, request_id, error)

    def _take_message(self, client: bytes, frame: bytes) -> None:
        message = validation.parse(frame)
        match message:
            case Generate():
                self.intake.generate(client, frame, message)
            case Abort():
                self.intake.abort(client, message.request_id)
            case Ping():
                self.clients.answer(client, Pong(PROTOCOL_VERSION, self._instance, MAX_FRAME_BYTES))
            case FlushCache():
                self._owners.check_operator(client, "the cache is that of")
                self._send_info_request(client, message)
            case GetInfo() | ReleaseCache():
                self._send_info_request(client, message)
            case GetProgress():
                self._send_progress_request(client, message)
            case GetTraces():
                validation.check_request_id(message.request_id)
                self.clients.answer(client, self.traces.answer(client, message))
            case Watch():
                validation.check_request_id(message.request_id)
                self._owners.check_operator(client, "the live feed shows requests of")
                self._viewers.watch(client, message)
            case Tokenize() | Detokenize():
                self.clients.answer(client, self._preparation.preparer.convert(message))

    def _take_long_message(self, client: bytes, frame: bytes) -> None:
        tag, _ = validation.peek(frame)
        if not tag:
            raise InvalidRequest("unreadable message: it has no tag; see docs/protocol.md")
        if tag not in TAGS_OF_LONG_MESSAGES:
            raise InvalidRequest(
                f"the message is {len(frame)} bytes: one of this kind has at most"
                f" {MAX_INLINE_BYTES}; see docs/protocol.md"
            )
        if tag == "generate":
            self.intake.generate(client, frame, None)
        else:
            outcome = self._preparation.pool.submit(client, frame)
            outcome.add_done_callback(partial(self._deliver_outcome, client))

    def _deliver_outcome(self, client: bytes, outcome: "asyncio.Future[bytes]") -> None:
        if not outcome.cancelled():
            self.clients.deliver(client, outcome.result())

    def _release(self, client: bytes, message: ReleaseCache) -> CacheRelease:
        """Return whose cached prefixes a client releases. Raise InvalidRequest."""
        if message.key is not None:
            validation.check_cache_key(message.key)
        owner = self._owners.owner(client, message.tenant)
        return CacheRelease(parent_name(owner.name), message.key)

    def _send_info_request(
        self,
        client: bytes,
        message: GetInfo | FlushCache | ReleaseCache,
    ) -> None:
        validation.check_request_id(message.request_id)
        release = self._release(client, message) if isinstance(message, ReleaseCache) else None
        self._info_requests.begin(client)
        current = {"refused": self.clients.num_refused, "open_requests": self.intake.num_open}
        info: InfoValues = {
            **self._static_info, **current, **self.traces.info(), **self._adapters.info()
        }  # fmt: skip
        if self._aliases is not None:
            info["models"] = self._aliases.endpoints(info["models"])
        flush_cache = isinstance(message, FlushCache)
        self._replicas.send(InfoRequest(client, message.request_id, info, flush_cache, release))

    def _send_progress_request(self, client: bytes, message: GetProgress) -> None:
        validation.check_request_id(message.request_id)
        ids = message.request_ids
        if len(ids) > MAX_PROGRESS_IDS:
            raise InvalidRequest(
                f"request_ids has {len(ids)} ids: at most {MAX_PROGRESS_IDS} are allowed; ask for"
                " the others with another message",
                "request_ids",
            )
        self._info_requests.begin(client)
        preparing = self.intake.preparing(client, ids)
        self._replicas.send(ProgressRequest(client, message.request_id, ids, preparing))

    def _on_client_lost(self, client: bytes) -> None:
        self._info_requests.forget(client)
        self._owners.forget(client)
        self._viewers.forget(client)
        self.intake.lose_client(client)

    # --- results ----------------------------------------------------------------------------------

    def show(self, frame: bytes, replica: int) -> None:
        """Pass a message of a replica's live feed on to the clients that watch it."""
        self._viewers.show(frame, replica)

    def on_known(self, known: dict[Name, AdapterRef | None]) -> None:
        """Take in which requests the replicas knew when this frontend began."""
        self.intake.on_known(known)

    def deliver(self, result: ClientResult) -> None:
        """Pass a result on to its client."""
        if result.num_waiting is not None:
            self._guard.update_queue(result.num_waiting, result.wait_s)
        if result.ended and result.is_lost:
            self.intake.count_lost_ends(result.client, result.ended)
        elif result.ended:
            self.intake.count_ends(result.ended)
        if result.traces:
            self.traces.take(result.client, result.traces)
        if not result.is_lost:
            self.clients.deliver(result.client, result.payload)

    def deliver_answer(self, client: bytes, payload: bytes) -> None:
        """Pass the answer to a question on to its client, as far as the client may see it."""
        self._info_requests.end(client)
        self.clients.deliver(client, self._owners.visible(client, payload))

    def on_drained(self) -> None:
        """Handle Drained, unless it answers the Drain of a predecessor.

        That one says nothing about clients that have not come back yet.
        """
        if self.intake.has_drained:
            self.clients.broadcast(ServerStopping("the server has stopped"))
            self._viewers.close()
            self._replicas.send(Shutdown())
            self.ended.set()
