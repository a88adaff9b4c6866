"""Who may leave the waiting queue now: limits of width, tokens, slots and pages."""

from quadriga.config import SchedulerArgs
from quadriga.errors import PromptTooLong, QueueFull
from scheduler_proc.batch import ForwardMode, ScheduleBatch
from scheduler_proc.kv_pages import PagePool
from scheduler_proc.policy import WaitingQueue
from scheduler_proc.request import Request, Status


class Admission:
    """Takes requests from the waiting queue into slots and pages, and back.

    A request reserves the pages of its whole possible length, so that decode never runs out.
    """

    def __init__(self, args: SchedulerArgs, pool: PagePool) -> None:
        self._width = args.prefill_width
        self._max_tokens = args.prefill_max_tokens
        self.pool = pool
        self._free_slots = list(range(args.max_running_requests - 1, -1, -1))
        self._released: list[int] = []

    def next_prefill(self, waiting: WaitingQueue, now: float) -> ScheduleBatch:
        """Admit from the front of the queue while everything fits.

        One prompt larger than the token budget goes alone rather than never.
        """
        admitted: list[Request] = []
        budget = self._max_tokens
        while len(waiting) and len(admitted) < self._width and self._free_slots:
            request = waiting.first(1, budget)[0]
            if request.to_compute > budget and admitted:
                break
            if self._pages_of(request) > self.pool.num_free:
                break
            waiting.take(request)
            budget -= request.to_compute
            self._seat(request, now)
            admitted.append(request)
        return ScheduleBatch(ForwardMode.EXTEND, admitted)

    def _seat(self, request: Request, now: float) -> None:
        request.slot = self._free_slots.pop()
        request.pages = self.pool.take(self._pages_of(request))
        request.admitted = now
        request.status = Status.PREFILLING

    def release(self, request: Request) -> None:
        """Give back slot and pages. Only when no step of the request is in flight."""
        assert request.in_flight == 0
        self._free_slots.append(request.slot)
        self._released.append(request.slot)
        self.pool.give_back(request.pages)
        request.slot, request.pages = -1, []

    def take_released(self) -> list[int]:
        """Slots that the worker has not yet been told to forget."""
        released, self._released = self._released, []
        return released

    def check_fits(self, request: Request) -> None:
        """Raise PromptTooLong for a request that the empty pool could not hold."""
        if self._pages_of(request) > self.pool.num_pages:
            raise PromptTooLong(
                f"prompt has {len(request.prompt)} tokens and max_new_tokens is"
                f" {request.max_new_tokens}, but the whole KV pool holds"
                f" {self.pool.num_pages * self.pool.page_size} tokens; ask for less or start the"
                " server with a larger --max-total-tokens",
                "prompt",
            )

    def _pages_of(self, request: Request) -> int:
        return self.pool.pages_for(request.reserved_tokens)


def check_queue(waiting: WaitingQueue, limit: int) -> None:
    """Raise QueueFull where no further request may wait."""
    if len(waiting) >= limit:
        raise QueueFull(
            f"{len(waiting)} requests are waiting and --max-queued-requests is {limit};"
            " try again later"
        )
