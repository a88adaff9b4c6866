"""A request's way from its arrival to the scheduler: admit, prepare, submit.

A short request takes it at once. Only what has to wait for another process goes the slow way: a
long message, an expression that is slow to compile, a grammar that was not checked lately.
"""

import asyncio
from dataclasses import dataclass
from typing import NamedTuple

from quadriga import clock
from quadriga.errors import QuadrigaError, RequestFailed, ServerStopping
from quadriga.sampling.params import MAX_CHOICES
from quadriga.server.processes.logs import log_exception
from quadriga.wire.adapter import AdapterRef
from quadriga.wire.client import Accepted, AdapterUsed, Generate, PlainAccepted, Refused, is_gateway
from quadriga.wire.grammar import GrammarForm
from quadriga.wire.packing import num_ids
from quadriga.wire.to_scheduler import CLIENT, CLIENT_LOST, Drain, FrontendRestarted, Submit
from tokenizer_proc.deliver.clients import Clients
from tokenizer_proc.deliver.traces import RingTraces
from tokenizer_proc.intake import grammar_validator, overload, tenants
from tokenizer_proc.intake.adapters import Adapters, salted
from tokenizer_proc.intake.pool import PreparePool
from tokenizer_proc.preparation import validation
from tokenizer_proc.preparation.prepare import Prepared, Preparer, decode_outcome
from tokenizer_proc.replicas import open_requests, placed
from tokenizer_proc.replicas.replicas import EndedChoice, Replicas

# The clients of a frontend that died try to connect many times a second; after this time the ones
# that still have open requests have asked the next frontend for them.
RETURN_TIMEOUT_S = 2.0
# A scheduler that has not said by then which requests it knows may know none.
PROOF_TIMEOUT_S = 30.0


class RequestPreparation(NamedTuple):
    """The means to prepare requests: at once, in the pool's processes, and for grammars."""

    preparer: Preparer
    pool: PreparePool
    grammars: grammar_validator.GrammarValidator

    def close(self) -> None:
        """End the processes."""
        self.pool.close()
        self.grammars.close()


@dataclass(slots=True, eq=False)
class IncomingRequest:
    """A request that was admitted and is not submitted yet.

    Attributes:
        received_at: Unix time in seconds.
        num_choices: 1 until the message has been read.
        resent: its client has sent it before, and needs all that was generated once more.
        aborted_by: as in AbortRequest; "" if the request was not aborted.
        task: prepares the request, if that has to wait.
    """

    client: bytes
    request_id: str
    received_at: float
    num_choices: int
    resent: bool
    aborted_by: str = ""
    task: "asyncio.Task[None] | None" = None


class RequestIntake:
    """Admit requests, have them prepared, and submit them to the scheduler.

    Args:
        replaces: a frontend before this one, of this run or of one that is resumed, has died, and
            its clients come back.
        owners: finds the tenants of requests.
        traces: decides which requests are traced.
        adapters: what requests can name.

    Attributes:
        has_drained: the scheduler knows that no further request will come.
    """

    def __init__(
        self,
        preparation: RequestPreparation,
        guard: overload.OverloadGuard,
        replicas: Replicas,
        clients: Clients,
        replaces: bool,
        owners: tenants.RequestOwners,
        traces: RingTraces,
        adapters: Adapters,
    ) -> None:
        self._traces = traces
        self._adapters = adapters
        self._tenants = tenants.TenantAccounts(owners)
        self._preparation = preparation
        self._guard = guard
        self._replicas = replicas
        self._clients = clients
        self._replaces = replaces
        self._incoming = open_requests.ClientRequests[IncomingRequest]()
        self._open = replicas.requests
        self._is_draining = False
        self._gateway_goes_on = False
        self._awaits_clients = replaces
        # What the schedulers knew when this frontend began; None: they have not said so yet.
        self._known: dict[placed.Name, AdapterRef | None] | None = None if replaces else {}
        self._unproven: list[tuple[IncomingRequest, Prepared, str | None]] = []
        self.has_drained = False

    def start(self) -> None:
        """Announce a frontend that replaces another one, and await the clients of that one."""
        if self._replaces:
            self._replicas.send(FrontendRestarted())
            loop = asyncio.get_running_loop()
            loop.call_later(RETURN_TIMEOUT_S, self._stop_awaiting_clients)
            loop.call_later(PROOF_TIMEOUT_S, self.on_known, {})
        self._adapters.start()
        self._sweep = asyncio.ensure_future(self._adapters.sweep(self._used_adapters))

    @property
    def num_open(self) -> int:
        """Number of requests that were admitted and have not ended."""
        return len(self._incoming) + self._open.num_open

    # --- admit, prepare, submit -------------------------------------------------------------------

    def generate(self, client: bytes, frame: bytes, message: Generate | None) -> None:
        """Take a request in, unless the same one is being prepared.

        `message` is decoded from the frame; None for a long one, which the pool decodes. Raise
        QuadrigaError where the request is refused.
        """
        request = self._admit(client, frame, message)
        if request is None:
            return
        if message is None or message.params.stop_regexes:
            self._start(request, self._preparation.pool.submit(client, frame))
            return
        prepared = self._preparation.preparer.prepare(message)
        grammar = prepared.grammar
        form = None if grammar is None else self._preparation.grammars.known_form(grammar)
        has_form = grammar is None or form is not None
        if has_form and not self._has_to_load(request, message.adapter):
            self._submit(request, prepared, form)
        else:
            self._start(request, prepared)

    def _admit(
        self, client: bytes, frame: bytes, message: Generate | None
    ) -> IncomingRequest | None:
        """Return a new request, or None for one that is being prepared. Raise QuadrigaError."""
        request_id = validation.peek(frame).request_id if message is None else message.request_id
        validation.check_request_id(request_id)
        may_be_resent = message is None or message.resent
        if (request := self._incoming.find(client, request_id)) is not None:
            request.resent |= may_be_resent
            return None
        num_choices = 1 if message is None else min(max(message.params.n, 1), MAX_CHOICES)
        if self._is_new(client, request_id, may_be_resent):
            if self._is_draining and not (self._gateway_goes_on and is_gateway(client)):
                raise ServerStopping("the server is stopping and takes no new requests")
            self._guard.check(num_choices, lambda: self._num_of_client(client))
        resent = message is not None and message.resent
        return IncomingRequest(client, request_id, clock.now(), num_choices, resent)

    def _num_of_client(self, client: bytes) -> int:
        return len(self._incoming.of_client(client)) + len(self._open.open_of_client(client))

    def _is_new(self, client: bytes, request_id: str, is_resent: bool) -> bool:
        """Return whether the limits for new requests apply to a request.

        A frontend that replaces another does not know what that one had admitted. It leaves resent
        requests to the scheduler, which knows the admitted ones and applies the limits to others.
        """
        if self._replaces and is_resent:
            return False
        return not self._open.was_accepted(client, request_id)

    def _start(self, request: IncomingRequest, work: "asyncio.Future[bytes] | Prepared") -> None:
        self._incoming.put(request.client, request.request_id, request)
        slow_way = self._prepare_and_submit(request, work)
        request.task = asyncio.get_running_loop().create_task(slow_way)

    async def _prepare_and_submit(
        self, request: IncomingRequest, work: "asyncio.Future[bytes] | Prepared"
    ) -> None:
        """Submit a request when the pool's `work` is done and its grammar is checked, or refuse it.

        The task is cancelled where the request has been removed.
        """
        try:
            with self._guard.preparing(request.num_choices):
                prepared = work if isinstance(work, Prepared) else _read_outcome(await work)
                request.resent |= prepared.request.resent
                form = None
                if prepared.grammar is not None:
                    is_new = self._is_new(request.client, request.request_id, request.resent)
                    form = await self._preparation.grammars.check(prepared.grammar, is_new)
                if self._has_to_load(request, prepared.request.adapter):
                    await self._adapters.load(prepared.request.adapter)
            self._submit(request, prepared, form)
        except QuadrigaError as error:
            self._clients.refuse(request.client, request.request_id, error)
        except Exception:  # as in Frontend.on_public
            log_exception()
            failed = RequestFailed("the server failed on this message; its log says why")
            self._clients.refuse(request.client, request.request_id, failed)
        finally:
            waits = any(unproven is request for unproven, _, _ in self._unproven)
            is_there = self._incoming.find(request.client, request.request_id) is request
            if is_there and not waits:
                self._incoming.remove(request.client, request.request_id)
                self._drain_if_idle()

    def _submit(self, request: IncomingRequest, prepared: Prepared, form: str | None) -> None:
        is_open = self._open.is_open(request.client, request.request_id)
        may_be_known = self._known is None and request.resent and not is_open
        if may_be_known and (
            prepared.request.adapter
            or self._tenants.has_limits(request.client, prepared.request.tenant)
        ):
            self._await_proof(request, prepared, form)
            return
        name = (request.client, request.request_id)
        is_proven = request.resent and self._known is not None and name in self._known
        prompt_ids, received_at = prepared.request.prompt_token_ids or b"", request.received_at
        num_prompt = num_ids(prompt_ids)
        adapter = self._adapter_of(request, prepared.request.adapter)
        message, owner = self._tenants.admit(
            request.client, prepared, request.resent, is_open, is_proven
        )
        if is_proven and self._known is not None:
            self._known.pop(name)
        self._guard.count_submitted(message.params.n)
        if adapter is not None and adapter.id:
            self._clients.answer(request.client, AdapterUsed(request.request_id, adapter.id))
        if message.acknowledge:
            hint = message.cache
            num_kept = 0 if hint is None else hint.num_tokens or num_prompt
            fields = request.request_id, num_prompt, prepared.prompt_end
            accepted = Accepted(*fields, num_kept) if num_kept else PlainAccepted(*fields)
            self._clients.answer(request.client, accepted)
        submit = Submit(
            client=request.client,
            request_id=request.request_id,
            prompt_ids=prompt_ids,
            params=message.params,
            stream=message.stream,
            received_at=received_at,
            tokenized_at=clock.now(),
            priority=message.priority,
            queue_deadline=_deadline(received_at, message.queue_timeout),
            deadline=_deadline(received_at, message.timeout),
            bad_words=prepared.bad_words,
            grammar=GrammarForm.of_request(form, prepared.thinking),
            client_retry=request.resent,
            tenant=owner.name,
            weight=owner.weight,
            cache_salt=salted(adapter, owner.salted(message.cache_salt)),
            trace=self._traces.context(request.client, message),
            adapter=adapter,
            cache=message.cache,
        )
        if self._replicas.submit(submit, request.aborted_by, message.keep_s):
            self._tenants.on_opened(owner)

    # --- requests of a frontend before this one ---------------------------------------------------

    def _await_proof(self, request: IncomingRequest, prepared: Prepared, form: str | None) -> None:
        """Keep a request until the scheduler has said whether it knows the request.

        One that it knows was counted by the frontend before this one. Any other one is new.
        """
        self._unproven.append((request, prepared, form))
        self._incoming.put(request.client, request.request_id, request)

    def on_known(self, known: dict[placed.Name, AdapterRef | None]) -> None:
        """Take in which requests the scheduler knows, and submit those that have waited for it."""
        if self._known is not None:
            return
        self._known = known
        unproven, self._unproven = self._unproven, []
        for request, prepared, form in unproven:
            if self._incoming.find(request.client, request.request_id) is not request:
                continue
            self._incoming.remove(request.client, request.request_id)
            if self._has_to_load(request, prepared.request.adapter):
                self._start(request, prepared)
                continue
            try:
                self._submit(request, prepared, form)
            except QuadrigaError as error:
                self._clients.refuse(request.client, request.request_id, error)
        self._drain_if_idle()

    # --- adapters ---------------------------------------------------------------------------------

    def _has_to_load(self, request: IncomingRequest, adapter: str) -> bool:
        """Return whether an adapter has to be loaded before a request that names it is submitted.

        A request that a scheduler may know goes on with what it has begun with.
        """
        if self._adapters.is_loaded(adapter):
            return False
        name = request.client, request.request_id
        may_be_known = self._known is None or name in self._known
        return not (self._open.find(*name) or (request.resent and may_be_known))

    def _adapter_of(self, request: IncomingRequest, adapter: str) -> AdapterRef | None:
        """Return the version of an adapter that a request runs with: the one that it began with.

        Raises:
            InvalidRequest: the request is new, and there is no adapter of this name.
        """
        name = request.client, request.request_id
        opened = self._open.find(*name)
        if opened is not None and opened.submit is not None:
            return opened.submit.adapter
        if adapter and request.resent and self._known is not None and name in self._known:
            # One that has ended is replayed, and needs no adapter: the worker refuses this one.
            return self._known[name] or AdapterRef("", adapter)
        return self._adapters.find(adapter)

    def _used_adapters(self) -> set[str] | None:
        """Return the ids of the adapters of open requests; None: they are not known yet."""
        if self._known is None:
            return None
        of_others = (a for name, a in self._known.items() if a and self._open.find(*name))
        return self._open.adapter_ids | {adapter.id for adapter in of_others}

    # --- questions about requests -----------------------------------------------------------------

    def preparing(self, client: bytes, request_ids: list[str]) -> list[str]:
        """Return those of a client's requests that are not submitted yet."""
        incoming = self._incoming.of_client(client)
        return [request_id for request_id in request_ids if request_id in incoming]

    # --- aborts and ends --------------------------------------------------------------------------

    def abort(self, client: bytes, request_id: str) -> None:
        """Abort one request of a client, or with an empty id all of them."""
        for name, request in self._incoming.of_client(client).items():
            if request_id in ("", name):
                request.aborted_by = CLIENT
        for opened in self._open.open_of_client(client):
            if request_id in ("", opened.name[1]):
                self._tenants.forget(*opened.name)
        self._replicas.abort(client, request_id, CLIENT)

    def count_ends(self, ended: list[EndedChoice]) -> None:
        """Count choices, and their generated tokens, as ended."""
        self._guard.count_ended(len(ended))
        for end in ended:
            if end.request is not None:
                self._tenants.on_choice_ended(end.request, end.num_generated)

    def count_lost_ends(self, client: bytes, ended: list[EndedChoice]) -> None:
        """Count the generated tokens of choices whose client's connection was lost."""
        for end in ended:
            self._tenants.on_lost_choice_ended(client, end.request_id, end.num_generated)

    def lose_client(self, client: bytes) -> None:
        """Forget the incoming requests of a client that is gone, and abort its open ones.

        Those with `keep_s` are aborted after that time, unless the client has resent them.
        """
        self._preparation.pool.drop(client)
        for incoming in self._incoming.remove_client(client).values():
            _cancel(incoming)
        lost = self._replicas.lose_client(client)
        self._tenants.on_lost(lost.ended)
        for request in lost.kept:
            assert request.keep_s is not None
            loop = asyncio.get_running_loop()
            loop.call_later(request.keep_s, self._end_kept, request, request.submit)
        self._drain_if_idle()

    def _end_kept(self, request: placed.PlacedRequest, submit: Submit | None) -> None:
        """End a request whose client is gone for too long."""
        if self._replicas.end(request, submit, CLIENT_LOST):
            self._tenants.on_lost([request])

    # --- the end ----------------------------------------------------------------------------------

    def drain(self, gateway_goes_on: bool = False) -> None:
        """Take no new requests. Accepted ones go on, and may be resent by their clients.

        gateway_goes_on: take requests of the gateway, such as the later texts of a call with many,
        until another drain says that it has left. The gateway itself refuses new calls.
        """
        self._is_draining = True
        self._gateway_goes_on = gateway_goes_on
        self._drain_if_idle()

    def abort_incoming(self, reason: str) -> None:
        """Refuse the requests that were not submitted yet, and any further one."""
        self._gateway_goes_on = False
        for request in list(self._incoming):
            self._incoming.remove(request.client, request.request_id)
            _cancel(request)
            self._preparation.pool.drop(request.client)
            self._clients.refuse(request.client, request.request_id, ServerStopping(reason))
        self._drain_if_idle()

    def _stop_awaiting_clients(self) -> None:
        self._awaits_clients = False
        self._open.on_change()  # the launcher has the number of the frontend before
        self._drain_if_idle()

    def _drain_if_idle(self) -> None:
        """Send Drain once no request can come any more: none is incoming or about to be resent."""
        awaits_requests = self._incoming or self._awaits_clients or self._gateway_goes_on
        if self._is_draining and not awaits_requests:
            self.has_drained = True
            self._replicas.send(Drain())


def _read_outcome(data: bytes) -> Prepared:
    """Return what the pool made of a Generate. Raise its QuadrigaError where that was refused."""
    outcome = decode_outcome(data)
    if isinstance(outcome, Refused):
        raise outcome.error.exception()
    assert isinstance(outcome, Prepared)
    return outcome


def _cancel(request: IncomingRequest) -> None:
    if request.task is not None:
        request.task.cancel()


def _deadline(received_at: float, timeout_s: float | None) -> float | None:
    """Return the Unix time at which a timeout is over."""
    return None if timeout_s is None else received_at + timeout_s
