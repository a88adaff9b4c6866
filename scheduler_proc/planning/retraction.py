"""Who gives way, where pages are short or somebody is urgent: it waits again, without pages."""

from collections.abc import Callable

from quadriga.config.scheduler_args import SchedulerArgs
from quadriga.errors import QuadrigaError
from scheduler_proc.planning.admission import Admission
from scheduler_proc.planning.static_batching import StaticBatchPadding
from scheduler_proc.state.batch import RunningBatch
from scheduler_proc.state.request import Request, RequestStatus, progress, worth

DEFAULT_PREEMPTION_THRESHOLD = 10


class Retractor:
    """Finds pages for those who run out of them, and places for the urgent.

    push: of whoever has to wait again. preempts: the urgent need not wait until somebody ends.
    in_flight: there are steps that are not answered. happened: somebody gave way in the step that
    is being planned. retractions: how often a request had to give its pages back.
    """

    def __init__(
        self,
        args: SchedulerArgs,
        admission: Admission,
        running: RunningBatch,
        padding: StaticBatchPadding,
        push: Callable[[Request], None],
        fail: Callable[[Request, QuadrigaError], None],
    ) -> None:
        self._admission = admission
        self._kv = admission.kv
        self._running = running
        self._padding = padding
        self._push = push
        self._fail = fail
        by_priority = args.schedule_policy == "priority"
        self._order = worth if by_priority else progress
        # Taking turns would give the place back to the one that was preempted, over and over.
        self.preempts = by_priority and not args.fair_clients
        self._threshold = args.priority_preemption_threshold or DEFAULT_PREEMPTION_THRESHOLD
        self.in_flight = False
        self.happened = False
        self.retractions = 0

    def make_room(self, request: Request) -> bool:
        """Whether there is another page for a request; the least worthy gives way if there is none.

        False: the request cannot run in this step. The pages of whoever gives way come back when
        its steps in flight are answered. A request that is alone and still has no room has filled
        the pool.
        """
        while self._kv.num_available == 0:
            if self._admission.leaving:
                return False
            if self._padding:
                self._padding.end()
                continue
            victim = self._victim()
            if victim is None:
                if self._kv.free_duplicates(request):
                    continue
                if not self.in_flight:
                    self.happened = True
                    self._fail(request, self._admission.pool_is_full(request))
                return False
            self.retract(victim)
            if victim is request:
                return False
        return True

    def _victim(self) -> Request | None:
        """The one who has generated least (of the lowest priority, where that counts); None where
        only one is left."""
        candidates = self._running.everybody
        return min(candidates, key=self._order) if len(candidates) > 1 else None

    def one_to(self, request: Request) -> None:
        """The least worthy of those who decode gives way to one who waits, if that is so much more
        urgent."""
        victim = min(self._running, key=worth, default=None)
        if victim is not None and self._outranks(request, victim):
            self.retract(victim)

    def chunked_to(self, first: list[Request]) -> None:
        """A long prompt takes up whole steps: somebody urgent need not wait for its end."""
        chunked = self._running.chunked
        if chunked is not None and any(self._outranks(one, chunked) for one in first):
            self.retract(chunked)

    def _outranks(self, request: Request, other: Request) -> bool:
        return request.priority - other.priority >= self._threshold

    def retract(self, request: Request) -> None:
        """Its pages are needed: it will wait again, and what is no longer cached by then is
        computed again. Its stream goes on as if nothing had happened."""
        self._running.remove(request)
        self.retractions += 1
        self.happened = True
        self._admission.ratio.retracted(list(self._running))
        request.status = RequestStatus.RETRACTED
        self._admission.leaving.add(request.seq)
        if request.in_flight == 0:
            self.requeue(request)

    def requeue(self, request: Request) -> None:
        """No step of a retracted request is in flight any more."""
        self._admission.release(request)
        if self._kv.pages_for(request.known) > self._kv.num_pages:
            self._fail(request, self._admission.pool_is_full(request))
            return
        request.status = RequestStatus.WAITING
        request.computed = 0
        request.forget_prompt()
        self._push(request)
