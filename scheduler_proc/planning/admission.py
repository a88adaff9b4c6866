"""Slots and pages: which waiting request can have them now, and the state that the core works on.

`Admission` gives slots and pages and takes them back, `CoreState` has all requests and pages, by
which every part of the core decides.
"""

from quadriga.errors import PromptTooLong, RequestFailed
from quadriga.server.config.engine_args import SchedulerArgs
from scheduler_proc.planning import policies, quarantine
from scheduler_proc.state import batch, kv_cache, kv_offload
from scheduler_proc.state.request import Request, RequestStatus

INIT_RATIO = 0.7
MIN_RATIO_FACTOR = 0.14  # times INIT_RATIO
DECAY_STEPS = 600
RETRACT_DECODE_STEPS = 20
MAX_EXPECTED_TOKENS = 4096  # of one request, whatever max_new_tokens says


class NewTokenRatio:
    """The share of the tokens still allowed that running requests are expected to generate.

    After SGLang: it decays with every decode step without retraction. A retraction raises it to
    what the running requests have really generated, plus a few steps of reserve.
    """

    def __init__(self, conservativeness: float) -> None:
        self.value = min(INIT_RATIO * conservativeness, 1.0)
        self._min = self.value * MIN_RATIO_FACTOR
        self._decay = (self.value - self._min) / DECAY_STEPS

    def decay(self) -> None:
        """Lower the ratio after a decode step without retraction."""
        self.value = max(self.value - self._decay, self._min)

    def on_retract(self, running: list[Request]) -> None:
        """Raise the ratio after a retraction. running: the requests that go on."""
        allowed = sum(request.sampling.max_new_tokens for request in running)
        generated = sum(request.num_generated + RETRACT_DECODE_STEPS for request in running)
        if allowed:
            self.value = max(self.value, min(1.0, generated / allowed))


class Admission:
    """Give slots and pages to requests, and take them back.

    Attributes:
        holders: requests that hold a slot and pages, by number.
        pending_release: numbers of the holders that give both back when their steps in flight are
            answered.
    """

    def __init__(self, args: SchedulerArgs, kv: kv_cache.KVCache) -> None:
        self.kv = kv
        self.ratio = NewTokenRatio(args.schedule_conservativeness)
        self.holders: dict[int, Request] = {}
        self.pending_release: set[int] = set()
        self._free_slots = list(range(args.max_running_requests - 1, -1, -1))
        self._released: list[int] = []

    @property
    def num_free_slots(self) -> int:
        """Number of slots that no request holds."""
        return len(self._free_slots)

    def expected_tokens(self) -> int:
        """Return for how many tokens all holders may still take pages, before the ratio."""
        return self.kv.growth(self.holders.values(), MAX_EXPECTED_TOKENS)

    def can_admit(self, request: Request, expected: int) -> bool:
        """Return whether slot and pages are free, and will probably last until a request ends.

        A request without others beside it can be admitted whenever its prompt fits.

        Args:
            request: one that waits.
            expected: number of tokens for which the holders may still take pages.
        """
        if not self._free_slots:
            return False
        spare = self.kv.num_available - self.kv.pages_needed(request)
        if spare < 0 or not self.holders:
            return spare >= 0
        expected += self.kv.growth([request], MAX_EXPECTED_TOKENS)
        return spare * self.kv.page_size >= self.ratio.value * expected

    def admit(self, request: Request, now: float) -> None:
        """Give a slot and pages to a request that can be admitted."""
        self.kv.allocate(request)
        request.slot = self._free_slots.pop()
        request.status = RequestStatus.PREFILLING
        if not request.admitted_at:
            request.admitted_at = now
            num_cached = request.num_computed_tokens
            request.cached_tokens = min(num_cached, request.num_prompt)
            request.num_cached_given = num_cached - request.cached_tokens
        self.holders[request.seq] = request

    def release(self, request: Request) -> None:
        """Take slot and pages back from a request that has no step in flight, if it holds any."""
        if request.slot < 0:
            return
        assert request.in_flight == 0
        self._free_slots.append(request.slot)
        self._released.append(request.slot)
        if request.status is not RequestStatus.RETRACTED:
            self.kv.keep(request)  # it ends
        self.kv.release(request)
        request.slot = -1
        del self.holders[request.seq]
        self.pending_release.discard(request.seq)

    def take_released(self) -> list[int]:
        """Return the slots released since the last call, for the worker to forget."""
        released, self._released = self._released, []
        return released

    def never_fits(self, request: Request) -> bool:
        """Return whether even the empty pool could not hold the request's tokens."""
        return self.kv.min_pages(request.num_known_tokens) > self.kv.num_pages

    def prompt_too_long(self, request: Request) -> PromptTooLong:
        """Return the error of a prompt that never fits."""
        return PromptTooLong(
            f"prompt has {request.num_prompt} tokens, but the whole KV pool holds"
            f" {self.kv.num_tokens} tokens; shorten it or start the"
            " server with a larger --max-total-tokens",
            "prompt",
        )

    def pool_is_full(self, request: Request) -> RequestFailed:
        """Return the error of a request that holds all pages and needs one more."""
        return RequestFailed(
            f"the request fills the whole KV pool of {self.kv.num_tokens}"
            f" tokens with {request.num_prompt} of its prompt and {request.num_generated} generated"
            " ones; ask for fewer tokens, or start the server with a larger --max-total-tokens"
        )


class CoreState:
    """Requests and pages.

    A request stands in `waiting` or `quarantine` until it has a slot, then in `running` as long as
    it needs steps. A quarantined one is in `quarantine` all the time.

    Args:
        args: the scheduler's flags.
        kv: the pages, none of which is held yet.
        offload: what is beyond them.
        waiting: the queue of the policy, which is empty.
        next_rows: how decode rows are given.

    Attributes:
        kv: the pages.
        offload: the pages beyond the pool.
        admission: the slots, and which requests hold slot and pages.
        waiting: the requests that wait, in the order of the policy.
        quarantine: the requests that run alone.
        running: the requests that decode, and those whose prompts are partly computed.
    """

    def __init__(
        self,
        args: SchedulerArgs,
        kv: kv_cache.KVCache,
        offload: kv_offload.KVOffload,
        waiting: policies.WaitingQueue,
        next_rows: batch.NextRows,
    ) -> None:
        self.kv = kv
        self.offload = offload
        self.admission = Admission(args, kv)
        self.waiting = waiting
        self.quarantine = quarantine.Quarantine()
        self.running = batch.RunningBatch(
            args.max_batch_size, args.batch_concurrency_beside, next_rows
        )

    def queue(self, request: Request) -> None:
        """Let a request without a slot wait."""
        (self.quarantine if quarantine.is_quarantined(request) else self.waiting).push(request)

    def remove(self, request: Request) -> None:
        """Let a request neither wait nor run any more."""
        self.waiting.remove(request)
        self.quarantine.remove(request)
        self.running.remove(request)
