"""The rows of a static batch that have ended: they are computed until its last request has."""

from scheduler_proc.planning.admission import Admission
from scheduler_proc.state.batch import ScheduleBatch
from scheduler_proc.state.request import Request


class StaticBatchPadding:
    """Requests that need no further step, and yet have a row in every one, as in static servers.

    They have had, or will have, their terminal message like any other; what their rows sample is
    dropped. Until the padding ends they keep slot and pages.
    """

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self._requests: dict[int, Request] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request: Request) -> bool:
        return request.seq in self._requests

    def add(self, request: Request) -> None:
        """From the next step on its row pads."""
        self._requests[request.seq] = request

    def rows(self) -> list[Request]:
        """Whoever can have a row in the next step.

        None grows longer than the longest of its batch may become, which the context holds.
        """
        if not self._requests:
            return []
        longest = max(request.most_known for request in self._admission.seated.values())
        return [request for request in self._requests.values() if request.known < longest]

    def add_rows(self, batch: ScheduleBatch, rows: list[Request]) -> None:
        """Let those of the rows that still pad do so in a step of decode. They take no page from
        anybody: where there is none left, a row stays out."""
        kv, seated = self._admission.kv, []
        for request in rows:
            if request not in self:
                continue
            if request.computed == request.capacity:
                if kv.num_available == 0:
                    continue
                batch.grown += (request.slot, kv.grow(request))
            seated.append(request)
        batch.add_decodes(seated)

    def end(self) -> None:
        """No row pads any more: the batch is over, or somebody who runs needs the pages."""
        requests, self._requests = self._requests.values(), {}
        for request in requests:
            self._admission.leaving.add(request.seq)
            if request.in_flight == 0:
                self._admission.release(request)
