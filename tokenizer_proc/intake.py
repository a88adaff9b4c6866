"""A request's way from its arrival to the scheduler: checked, prepared, submitted."""

import asyncio
from functools import partial

from quadriga import clock
from quadriga.config.server_config import FrontendArgs
from quadriga.errors import QuadrigaError, ServerStopping
from quadriga.sampling.limits import MAX_CHOICES
from quadriga.wire.messages.grammar import GrammarForm
from quadriga.wire.messages.public import Generate, Refused
from quadriga.wire.messages.to_scheduler import CLIENT, CLIENT_LOST, Drain, Submit
from quadriga.wire.sockets import Outbox
from tokenizer_proc.clients import Clients
from tokenizer_proc.grammars.validator import GrammarValidator
from tokenizer_proc.incoming import IncomingRequest, IncomingRequests
from tokenizer_proc.open_requests import OpenRequests
from tokenizer_proc.overload import OverloadGuard
from tokenizer_proc.preparation import validation as requests
from tokenizer_proc.preparation.pool import PreparePool
from tokenizer_proc.preparation.prepare import Prepared, Preparer, decode_outcome


class RequestIntake:
    """Take requests in and submit them. The same request is taken in once, however often it comes.

    Args:
        preparer: for short messages.
        pool: for long ones.
        replaces: a front door before this one has died, and its clients come back.

    Attributes:
        has_drained: the scheduler knows that nothing new will come.
    """

    def __init__(
        self,
        args: FrontendArgs,
        load: OverloadGuard,
        preparer: Preparer,
        pool: PreparePool,
        grammars: GrammarValidator,
        scheduler: Outbox,
        clients: Clients,
        replaces: bool,
    ) -> None:
        self._args = args
        self._load = load
        self._preparer = preparer
        self._pool = pool
        self._grammars = grammars
        self._scheduler = scheduler
        self._clients = clients
        self._replaces = replaces
        self._incoming = IncomingRequests()
        self._outstanding = OpenRequests(scheduler)
        self._draining = False
        self._awaits_clients = replaces
        self.has_drained = False

    @property
    def num_open(self) -> int:
        """Requests that were let in and have not ended."""
        return len(self._incoming) + len(self._outstanding)

    def generate(self, client: bytes, frame: bytes, message: Generate | None) -> None:
        """Take a request in, unless it is incoming already.

        Args:
            message: the frame's message; None for a long one, which a worker reads.

        Raises:
            QuadrigaError: the request is refused.
        """
        request_id = requests.peek(frame).request_id if message is None else message.request_id
        requests.check_request_id(request_id)
        is_resent = message is None or message.resent
        num_choices = 1 if message is None else min(max(message.params.n, 1), MAX_CHOICES)
        incoming = self._incoming.find(client, request_id)
        if incoming is not None:
            incoming.resent |= is_resent
            return
        if self._is_new(client, request_id, is_resent):
            self._check_welcome(client, num_choices)
        incoming = IncomingRequest(
            client, request_id, clock.now(), num_choices, message is not None and message.resent
        )
        if message is None or message.params.stop_regexes:  # which take long to compile
            self._pool.submit(client, frame, partial(self._take_outcome, incoming))
            self._let_in(incoming)
        else:
            prepared = self._preparer.prepare(message)
            self._let_in(incoming)
            self._take_prepared(incoming, prepared)

    def _is_new(self, client: bytes, request_id: str, is_resent: bool) -> bool:
        """Return whether a request may be refused because there is too much to do.

        A front door that replaces another one does not know what that one had let in: of what is
        sent again the scheduler knows it, and refuses what is new and too much.
        """
        if self._replaces and is_resent:
            return False
        return not self._outstanding.was_accepted(client, request_id)

    def _check_welcome(self, client: bytes, num_choices: int) -> None:
        """Raise where a new request may not come in now."""
        if self._draining:
            raise ServerStopping("the server is stopping and takes no new requests")
        num_open = self._incoming.num_of(client) + self._outstanding.num_of(client)
        self._load.check(num_open, num_choices)

    def _let_in(self, incoming: IncomingRequest) -> None:
        self._incoming.add(incoming)
        self._load.let_in(incoming.num_choices)

    def abort(self, client: bytes, request_id: str) -> None:
        """Abort one request of a client, or with an empty id all of them."""
        self._incoming.abort(client, request_id, CLIENT)
        self._outstanding.abort(client, request_id, CLIENT)

    def ended(self, client: bytes, request_ids: list[str]) -> None:
        """Count a choice of each of these requests as ended."""
        self._load.ended(len(request_ids))
        self._outstanding.ended(client, request_ids)

    def lose(self, client: bytes) -> None:
        """End everything of a client that is gone."""
        self._pool.drop(client)
        self._incoming.abort(client, "", CLIENT_LOST)
        self._outstanding.lose(client)
        self._pass_drain_on()

    # --- from its arrival to the scheduler --------------------------------------------------------

    def _take_outcome(self, incoming: IncomingRequest, data: bytes) -> None:
        """Take what a worker has made of a request's message."""
        if incoming not in self._incoming:
            return
        outcome = decode_outcome(data)
        if isinstance(outcome, Prepared):
            self._load.let_in(outcome.request.params.n - incoming.num_choices)
            incoming.resent |= outcome.request.resent
            self._take_prepared(incoming, outcome)
        else:
            assert isinstance(outcome, Refused)
            self._leave(incoming, outcome.error.exception())

    def _take_prepared(self, incoming: IncomingRequest, prepared: Prepared) -> None:
        incoming.prepared = prepared
        if prepared.grammar is None:
            self._submit(incoming, None)
        else:
            is_new = self._is_new(incoming.client, incoming.request_id, incoming.resent)
            then = partial(self._take_grammar, incoming)
            self._grammars.check(prepared.grammar, then, is_new)

    def _take_grammar(self, incoming: IncomingRequest, form: "asyncio.Future[str]") -> None:
        if incoming not in self._incoming:
            return
        try:
            grammar = GrammarForm.of(form.result())
        except QuadrigaError as error:
            self._leave(incoming, error)
        else:
            self._submit(incoming, grammar)

    def _submit(self, incoming: IncomingRequest, grammar: GrammarForm | None) -> None:
        prepared, args, received = incoming.prepared, self._args, incoming.received_at
        assert prepared is not None
        request = prepared.request
        message = Submit(
            client=incoming.client,
            request_id=incoming.request_id,
            prompt_ids=request.prompt_token_ids or b"",
            params=request.params,
            stream=request.stream,
            received=received,
            tokenized=clock.now(),
            priority=request.priority,
            queue_deadline=requests.deadline(received, request.queue_timeout, args.queue_timeout),
            deadline=requests.deadline(received, request.timeout, args.request_timeout),
            bad_words=prepared.bad_words,
            grammar=grammar,
            resent=incoming.resent,
        )
        self._outstanding.submit(message, incoming.aborted_by)
        self._leave(incoming)

    def _leave(self, incoming: IncomingRequest, error: QuadrigaError | None = None) -> None:
        """A request went on to the scheduler, or is refused."""
        self._incoming.remove(incoming)
        if error is not None:
            self._clients.refuse(incoming.client, incoming.request_id, error)
        self._pass_drain_on()

    # --- another scheduler, and the end -----------------------------------------------------------

    def scheduler_was_replaced(self) -> None:
        """Send what is open to another scheduler, which may not know of everything that the one
        before was sent."""
        self._scheduler.renew()
        self._outstanding.send_again()
        self._pass_drain_on()

    def clients_are_back(self) -> None:
        """The clients of the front door before this one have had their time to come back."""
        self._awaits_clients = False
        self._pass_drain_on()

    def drain(self) -> None:
        """Take no new requests; what was accepted goes on, and its clients may come back for it."""
        self._draining = True
        self._pass_drain_on()

    def abort_incoming(self, reason: str) -> None:
        """Refuse the requests that the scheduler was not sent yet."""
        for incoming in self._incoming:
            self._pool.drop(incoming.client)
            self._leave(incoming, ServerStopping(reason))

    def _pass_drain_on(self) -> None:
        if self._draining and not self._incoming and not self._awaits_clients:
            self.has_drained = True
            self._scheduler.send(Drain())
