"""Static batching (--batching static): a batch runs to its end before the next one is admitted.

A request that has ended keeps slot, pages and a row in every step until the last one of its batch
has ended, as in static servers; what its row samples is dropped.
"""

from quadriga.config.scheduler_args import SchedulerArgs
from scheduler_proc.core import SchedulerCore
from scheduler_proc.state.plan import Capacity, Plan
from scheduler_proc.state.request import Request


class StaticCore(SchedulerCore):
    """A scheduler core whose batches run to their end, padded with the rows of ended requests."""

    def __init__(self, args: SchedulerArgs, capacity: Capacity, num_retractions: int = 0) -> None:
        super().__init__(args, capacity, num_retractions)
        self._padding: dict[int, Request] = {}
        self._fills_batch = True

    @property
    def has_work(self) -> bool:
        """Whether a request could use a step, or padding holds slots and pages."""
        return super().has_work or len(self._padding) > 0

    @property
    def has_room(self) -> bool:
        """Whether no batch is running, and the next prefill step has room to spare."""
        return not self._padding and super().has_room

    def plan(self, now: float, in_flight: bool) -> Plan:
        """Return the next step. The first one that decodes closes its batch."""
        plan = super().plan(now, in_flight)
        if plan.batch.num_decodes:
            self._fills_batch = False
        return plan

    def _compose(self, plan: Plan, now: float) -> None:
        if not self._running.all_requests:
            self._release_padding()
        super()._compose(plan, now)

    def _add_quarantined(self, request: Request, plan: Plan, now: float) -> None:
        if request.slot < 0:
            self._release_padding()
        super()._add_quarantined(request, plan, now)

    def _append_page(self, request: Request, plan: Plan) -> bool:
        if self.kv.num_available == 0 and not self.admission.pending_release:
            self._release_padding()
        return super()._append_page(request, plan)

    def _num_admissible(self) -> int:
        num_holders = len(self.admission.holders)
        if num_holders == 0:
            self._fills_batch = True
        if not self._fills_batch:
            return 0
        return min(super()._num_admissible(), self._width - num_holders)

    def _add_decodes(self, plan: Plan) -> None:
        padding = self._padding_rows()
        num_before = plan.batch.num_decodes
        super()._add_decodes(plan)
        if plan.batch.num_decodes > num_before:
            self._add_padding(padding, plan)

    def _padding_rows(self) -> list[Request]:
        """Return the ended requests that can have a row in the next step.

        None grows longer than the longest of its batch may become, which the context holds.
        """
        if not self._padding:
            return []
        longest = max(request.max_total_tokens for request in self.admission.holders.values())
        return [r for r in self._padding.values() if r.num_known_tokens < longest]

    def _add_padding(self, rows: list[Request], plan: Plan) -> None:
        """Add the rows that still pad. They take no page from others: without one a row is out."""
        padding = []
        for request in rows:
            if request.seq not in self._padding:
                continue
            if request.num_computed_tokens == request.page_capacity:
                if self.kv.num_available == 0:
                    continue
                plan.batch.grown += (request.slot, self.kv.append_page(request))
            padding.append(request)
        plan.batch.add_decodes(padding)

    def _stop_decoding(self, request: Request) -> None:
        super()._stop_decoding(request)
        self._padding[request.seq] = request

    def _release(self, request: Request) -> None:
        if request.seq not in self._padding:
            super()._release(request)

    def _release_padding(self) -> None:
        """Release slots and pages of the padding, at the latest when its steps are answered."""
        requests, self._padding = self._padding, {}
        for request in requests.values():
            self.admission.pending_release.add(request.seq)
            if request.in_flight == 0:
                self.admission.release(request)


def make_core(args: SchedulerArgs, capacity: Capacity, num_retractions: int = 0) -> SchedulerCore:
    """Return the core that --batching asks for. num_retractions: before it was made."""
    core = StaticCore if args.batching == "static" else SchedulerCore
    return core(args, capacity, num_retractions)
