"""How requests come in: each once, and into the waiting queue unless something holds it back."""

from collections.abc import Callable, Iterable

from quadriga.config.scheduler_args import SchedulerArgs
from quadriga.errors import QuadrigaError, ServerStopping
from quadriga.wire.messages.to_scheduler import Submit
from scheduler_proc.durability.detok_outbox import DetokOutbox
from scheduler_proc.durability.journal import Journal, NoJournal
from scheduler_proc.durability.journal_recovery import RecoveredRequest
from scheduler_proc.grammar_queue import GrammarQueue
from scheduler_proc.planning.admission import check_client, check_queue
from scheduler_proc.planning.deadlines import Deadlines
from scheduler_proc.planning.planner import Planner
from scheduler_proc.request_table import RequestTable
from scheduler_proc.state.request import Request


class Intake:
    """planner: None before there is a worker; whoever comes then waits among the live requests.

    fail: ends a request that cannot be taken.
    """

    def __init__(
        self,
        args: SchedulerArgs,
        requests: RequestTable,
        texts: DetokOutbox,
        journal: Journal | NoJournal,
        deadlines: Deadlines,
        grammars: GrammarQueue,
        fail: Callable[[Request, QuadrigaError], None],
    ) -> None:
        self._args = args
        self._requests = requests
        self._texts = texts
        self._journal = journal
        self._deadlines = deadlines
        self._grammars = grammars
        self._fail = fail
        self.planner: Planner | None = None
        self.is_draining = False

    @property
    def num_queued(self) -> int:
        """Requests that nothing holds back any more, and that have no slot."""
        return len(self.planner.waiting) if self.planner is not None else 0

    @property
    def num_waiting(self) -> int:
        """All who have no slot: also those whose grammar is being compiled."""
        if self.planner is None:
            return len(self._requests)
        return self.num_queued + len(self.planner.trial) + self._grammars.num_waiting

    def take_up(self, found: Iterable[RecoveredRequest], first_seq: int = 0) -> None:
        """Go on with what another scheduler has left in the journal. first_seq: new requests have
        numbers from there on."""
        self._requests.number_from(first_seq)
        for one in found:
            request = self._requests.restore(one)
            self._journal.keep(one.message, [request])
            if not request.finished:
                self._deadlines.watch(request)
                continue
            self._texts.recall(request, one.settled)
            if one.settled:
                self._journal.settled([request.seq])
        self._journal.compact()

    def accept(self, message: Submit) -> None:
        """Take in what a client asks for, unless it is known. What cannot be taken ends at once."""
        if self._is_known(message):
            return
        queued = self.num_waiting
        num_open = self._requests.num_names_of(message.client)
        self._texts.begins(message.client, message.request_id)
        requests = self._requests.add(message)
        self._journal.accepted(message, requests)
        if message.resent or message.again:
            # Its client may have a part of it, from a scheduler that died and wrote nothing down.
            self._texts.tell(requests, [], queued)
        try:
            if not message.again:
                self._check_welcome(queued, len(requests), num_open)
        except QuadrigaError as error:
            for request in requests:
                self._fail(request, error)
            return
        for request in requests:
            self._deadlines.watch(request)
            self.hold_or_enqueue(request)

    def _check_welcome(self, num_queued: int, num_choices: int, num_open: int) -> None:
        """Raise where a new request may not come in. The front door has checked the same, as far
        as it knew; one that replaces another lets everything pass that a client sends again.

        Args:
            num_queued: requests that wait.
            num_choices: of the new request.
            num_open: other open requests of its client.
        """
        if self.is_draining:
            raise ServerStopping("the server is stopping and takes no new requests")
        check_queue(num_queued, num_choices, self._args.max_queued_requests)
        check_client(num_open, self._args.max_requests_per_client)

    def _is_known(self, message: Submit) -> bool:
        """It was accepted before. A client that has sent it again is told all there is of it."""
        name = (message.client, message.request_id)
        live = self._requests.of(*name)
        if not message.resent:
            return bool(live) or (message.again and self._texts.has_ended(*name, message.received))
        ended = self._texts.ended(*name)
        self._texts.tell(live, ended, self.num_waiting)
        return bool(live or ended)

    def hold_or_enqueue(self, request: Request) -> None:
        """Into the waiting queue, at once or when the worker has compiled its grammar."""
        if request.grammar is not None:
            self._grammars.arrived(request)
        if not self._grammars.is_held_back(request):
            self.enqueue(request)

    def enqueue(self, request: Request) -> None:
        """Into the waiting queue, unless the request can never run."""
        if self.planner is None:
            return
        try:
            self.planner.admission.check_fits(request)
        except QuadrigaError as error:
            self._fail(request, error)
            return
        self.planner.push(request)
