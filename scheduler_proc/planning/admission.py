"""Who may leave the waiting queue now: slots, pages, and what the running ones may still need."""

from quadriga.config.scheduler_args import SchedulerArgs
from quadriga.errors import PromptTooLong, QueueFull, RequestFailed
from scheduler_proc.state.kv_cache import KVCache
from scheduler_proc.state.request import Request, RequestStatus

INIT_RATIO = 0.7
MIN_RATIO = 0.14
"""Of INIT_RATIO."""
DECAY_STEPS = 600
RETRACT_DECODE_STEPS = 20
RETRY_AFTER = 1.0
"""Seconds, for whoever came to a queue that the front door did not know to be full."""
MAX_EXPECTED_TOKENS = 4096
"""Nobody is expected to generate more than so many further tokens, whatever was asked for."""


class NewTokenRatio:
    """The share of the tokens that requests may still ask for that they are expected to generate.

    After SGLang: it decays with every decode step that went well, and after a retraction jumps to
    what the running requests have really generated, plus a few steps of reserve.
    """

    def __init__(self, conservativeness: float) -> None:
        self._init = min(INIT_RATIO * conservativeness, 1.0)
        self._min = self._init * MIN_RATIO
        self._decay = (self._init - self._min) / DECAY_STEPS
        self.value = self._init

    def step_went_well(self) -> None:
        self.value = max(self.value - self._decay, self._min)

    def retracted(self, running: list[Request]) -> None:
        """running: those that go on."""
        asked = sum(request.max_new_tokens for request in running)
        generated = sum(request.num_generated + RETRACT_DECODE_STEPS for request in running)
        if asked:
            self.value = max(self.value, min(1.0, generated / asked))


class Admission:
    """Gives slots and pages to requests, and takes them back.

    leaving: those who give both back as soon as their steps in flight are answered, by number.
    """

    def __init__(self, args: SchedulerArgs, kv: KVCache) -> None:
        self.kv = kv
        self.ratio = NewTokenRatio(args.schedule_conservativeness)
        self.seated: dict[int, Request] = {}
        self.leaving: set[int] = set()
        self._free_slots = list(range(args.max_running_requests - 1, -1, -1))
        self._released: list[int] = []

    @property
    def num_free_slots(self) -> int:
        return len(self._free_slots)

    def expected_tokens(self) -> int:
        """Tokens that all who hold a slot may still generate, before the ratio."""
        expected = 0
        for request in self.seated.values():
            left = request.most_known - request.known
            expected += left if left < MAX_EXPECTED_TOKENS else MAX_EXPECTED_TOKENS
        return expected

    def fits(self, request: Request, expected: int) -> bool:
        """Whether it can be seated, and the pages will probably last until somebody ends.

        expected: tokens that those who are seated may still generate. A request that is alone fits
        whenever its prompt does.
        """
        if not self._free_slots:
            return False
        spare = self.kv.num_available - self.kv.pages_needed(request)
        if spare < 0 or not self.seated:
            return spare >= 0
        expected += min(request.num_remaining_tokens, MAX_EXPECTED_TOKENS)
        return spare * self.kv.page_size >= self.ratio.value * expected

    def seat(self, request: Request, now: float) -> None:
        """Give a request that fits a slot and its pages."""
        self.kv.seat(request)
        request.slot = self._free_slots.pop()
        request.status = RequestStatus.PREFILLING
        if not request.admitted:
            request.admitted = now
            request.cached_tokens = request.computed
        self.seated[request.seq] = request

    def release(self, request: Request) -> None:
        """Take slot and pages back, if it has them. No step of the request may be in flight."""
        if request.slot < 0:
            return
        assert request.in_flight == 0
        self._free_slots.append(request.slot)
        self._released.append(request.slot)
        self.kv.release(request)
        request.slot = -1
        del self.seated[request.seq]
        self.leaving.discard(request.seq)

    def take_released(self) -> list[int]:
        """Slots that the worker has not yet been told to forget."""
        released, self._released = self._released, []
        return released

    def check_fits(self, request: Request) -> None:
        """Raise PromptTooLong for a prompt that the empty pool could not hold."""
        if self.kv.pages_for(request.known) > self.kv.num_pages:
            raise PromptTooLong(
                f"prompt has {request.num_prompt} tokens, but the whole KV pool holds"
                f" {self.kv.num_pages * self.kv.page_size} tokens; shorten it or start the"
                " server with a larger --max-total-tokens",
                "prompt",
            )

    def pool_is_full(self, request: Request) -> RequestFailed:
        """What to tell a request that holds all pages and needs one more."""
        return RequestFailed(
            f"the request fills the whole KV pool of {self.kv.num_pages * self.kv.page_size}"
            f" tokens with {request.num_prompt} of its prompt and {request.num_generated} generated"
            " ones; ask for fewer tokens, or start the server with a larger --max-total-tokens"
        )


def check_queue(waiting: int, count: int, limit: int) -> None:
    """Raise QueueFull where so many further requests may not wait."""
    if waiting + count > limit:
        raise QueueFull(
            f"{waiting} requests are waiting and --max-queued-requests is {limit};"
            f" try again in {RETRY_AFTER:g} s",
            RETRY_AFTER,
        )


def check_client(num_open: int, limit: int | None) -> None:
    """Raise QueueFull where a client with so many open requests may not have another one."""
    if limit is not None and num_open >= limit:
        raise QueueFull(
            f"this client has {num_open} open requests and --max-requests-per-client is {limit};"
            f" wait until one has ended, or try again in {RETRY_AFTER:g} s",
            RETRY_AFTER,
        )
