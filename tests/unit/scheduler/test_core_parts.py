"""Parts of the core without the core: who gets the last pages, and what static batching keeps."""

import pytest

from quadriga.server.config.engine_args import SchedulerArgs
from scheduler_proc.planning.admission import CoreState
from scheduler_proc.planning.batching import make_batching
from scheduler_proc.planning.fairness import make_queue, make_turns
from scheduler_proc.planning.retraction import PageGrowth, Retraction
from scheduler_proc.state.batch import Plan, ScheduleBatch
from scheduler_proc.state.kv_cache import KVCache
from scheduler_proc.state.kv_offload import NoOffload
from scheduler_proc.state.request import Request, RequestStatus
from tests.unit.simulation import submit

PAGE_SIZE = 4


class Parts:
    """The parts that pages pass through, over a pool without a prefix cache."""

    def __init__(self, num_pages: int, batching: str = "continuous") -> None:
        args = SchedulerArgs(max_running_requests=4, max_batch_size=4, batching=batching)
        self.kv = KVCache(num_pages, PAGE_SIZE, prefix_cache=False)
        waiting = make_queue(args, self.kv.match_prefix, PAGE_SIZE)
        self.state = CoreState(args, self.kv, NoOffload(), waiting, make_turns(args))
        self.batching = make_batching(args, self.state)
        self.growth = PageGrowth(
            self.state, self.batching, Retraction(args, self.state, num_retractions=0)
        )

    def run(self, seq: int, num_pages: int) -> Request:
        """Return a running request with full pages. It has generated `seq` tokens."""
        message = submit(f"r{seq}", [9] * (num_pages * PAGE_SIZE), 100)
        request = Request.from_submit(seq, message, frozenset())
        self.state.admission.admit(request, 0.0)
        request.num_computed_tokens = request.num_known_tokens
        request.num_known_tokens += 1
        request.tokens.extend([7] * seq)
        self.state.running.add(request)
        return request

    def grow(self, request: Request, plan: Plan) -> bool:
        """Return whether a request gets a page for its next token."""
        return self.growth.grow_decodes([request], plan) == [request]


def test_a_page_that_is_available_is_appended_and_noted_in_the_plan() -> None:
    parts = Parts(num_pages=3)
    first, second = parts.run(0, num_pages=1), parts.run(1, num_pages=1)
    plan = Plan(in_flight=True)
    second.num_computed_tokens -= 1  # it has room
    assert parts.growth.grow_decodes([first, second], plan) == [first, second]
    assert plan.batch.grown == [first.slot, first.pages[1]]
    assert len(second.pages) == 1 and not plan.has_retracted


def test_the_request_that_has_generated_least_gives_its_pages_at_once_or_after_its_step() -> None:
    for in_flight in (0, 1):
        parts = Parts(num_pages=3)
        least, most = parts.run(0, num_pages=1), parts.run(5, num_pages=2)
        least.in_flight = in_flight
        plan = Plan(in_flight=in_flight > 0)
        assert parts.grow(most, plan) == (in_flight == 0)
        assert [request for request, _ in plan.retracted] == [least]
        assert (least in list(parts.state.waiting)) == (in_flight == 0)
        assert most in parts.state.running and not plan.failed


def test_a_request_that_is_retracted_itself_has_no_row() -> None:
    parts = Parts(num_pages=3)
    least, most = parts.run(0, num_pages=1), parts.run(5, num_pages=2)
    plan = Plan(in_flight=False)
    assert parts.growth.grow_decodes([least, most], plan) == [most]
    assert least.status is RequestStatus.WAITING
    assert plan.batch.grown == [most.slot, most.pages[2]]


@pytest.mark.parametrize("in_flight", [False, True])
def test_a_request_that_fills_the_pool_alone_fails_when_no_step_may_end_it(in_flight: bool) -> None:
    parts = Parts(num_pages=2)
    request, plan = parts.run(0, num_pages=2), Plan(in_flight)
    assert not parts.grow(request, plan)
    assert [failed for failed, _ in plan.failed] == ([] if in_flight else [request])
    assert (request in parts.state.running) == in_flight
    assert parts.kv.num_available == (0 if in_flight else 2)


def test_padding_gives_its_pages_before_a_request_is_retracted() -> None:
    parts = Parts(num_pages=4, batching="static")
    ended, *running = parts.run(0, num_pages=1), parts.run(5, num_pages=1), parts.run(6, 2)
    parts.batching.remove(ended)
    assert parts.batching.holds_slots and parts.kv.num_available == 0
    plan = Plan(in_flight=False)
    assert parts.grow(running[1], plan)
    assert not plan.retracted and not parts.batching.holds_slots
    assert ended.slot < 0


def test_a_static_batch_is_closed_by_its_first_decode_step_until_all_have_left() -> None:
    parts = Parts(num_pages=4, batching="static")
    batching, first, second = parts.batching, parts.run(0, 1), parts.run(1, 1)
    assert batching.num_admissible(4) == 2  # the width without those that have slots
    batching.add_rows(ScheduleBatch())
    assert batching.num_admissible(4) == 0
    batching.remove(first)
    step = ScheduleBatch()
    batching.add_rows(step)
    assert step.requests == [first] and batching.num_admissible(4) == 0
    first.in_flight = 0
    batching.remove(second)
    batching.end_batch()
    assert batching.num_admissible(4) == 4 and parts.kv.num_available == 4


def test_continuous_batching_gives_slot_and_pages_back_with_the_last_step_in_flight() -> None:
    parts = Parts(num_pages=2)
    request = parts.run(0, num_pages=1)
    request.in_flight = 1
    parts.batching.remove(request)
    assert request not in parts.state.running and request.slot >= 0
    request.in_flight = 0
    parts.batching.release(request)
    assert request.slot < 0 and parts.kv.num_available == 2
