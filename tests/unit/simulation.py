"""A simulated worker and clock, so that the scheduler runs without processes."""

from collections import deque

import msgspec

from quadriga.config import SchedulerArgs
from quadriga.messages import (
    AbortRequest,
    CloseText,
    SchedulerMessage,
    StepOutput,
    StepPlan,
    StepResult,
    Submit,
    WorkerReady,
    pack_ids,
    unpack_ids,
)
from quadriga.sampling import SamplingParams
from scheduler_proc.scheduler import Scheduler

EOS = 2


def next_token(history: list[int]) -> int:
    """The simulated model: a token that depends on all tokens before it; sometimes EOS."""
    value = len(history) * 7919
    for token in history:
        value = (value * 31 + token + 11) % 1_000_003
    return EOS if value % 23 == 0 else 3 + value % 97


def reference(prompt: list[int], max_new_tokens: int, ignore_eos: bool) -> list[int]:
    """What the simulated model gives to a request that is alone."""
    history = list(prompt)
    for _ in range(max_new_tokens):
        history.append(next_token(history))
        if history[-1] == EOS and not ignore_eos:
            break
    return history[len(prompt) :]


class SimulatedWorker:
    """Runs plans one at a time, in simulated time, and checks every one of them.

    It keeps KV by page and position, as a real worker does: a page that two requests hold, or a
    token that was never computed, gives a wrong answer or an AssertionError.
    """

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.plans: deque[StepPlan] = deque()
        self.known: dict[int, list[int]] = {}
        self.computed: dict[int, int] = {}
        self.pages: dict[int, list[int]] = {}
        self.kv: dict[tuple[int, int], int] = {}
        self.now = 1000.0
        self.stopped = False
        self.rows_of_steps: list[list[int]] = []

    def send(self, message: msgspec.Struct) -> None:
        if isinstance(message, StepPlan):
            self.plans.append(message)
            assert len(self.plans) <= 2, "more than two plans are outstanding"
        else:
            self.stopped = True

    def run_one(self) -> StepResult | None:
        """The result of the oldest plan; None where there is none."""
        if not self.plans:
            return None
        plan = self.plans.popleft()
        for slot in unpack_ids(plan.released):
            del self.known[slot], self.computed[slot], self.pages[slot]
        for new in plan.new:
            assert new.slot not in self.known, f"slot {new.slot} is given to two requests"
            self.known[new.slot] = unpack_ids(new.token_ids).tolist()
            self.computed[new.slot] = new.computed
            self.pages[new.slot] = unpack_ids(new.pages).tolist()
        self._check_pages()
        slots, counts = unpack_ids(plan.slots).tolist(), unpack_ids(plan.num_tokens).tolist()
        assert len(set(slots)) == len(slots)
        tokens = [self._row(slot, count) for slot, count in zip(slots, counts, strict=True)]
        self.rows_of_steps.append(slots)
        began, self.now = self.now, self.now + 0.01
        return StepResult(plan.step, pack_ids(tokens), began, self.now)

    def _check_pages(self) -> None:
        held = [page for pages in self.pages.values() for page in pages]
        assert len(held) == len(set(held)), "a page is held twice"

    def _row(self, slot: int, count: int) -> int:
        known, start = self.known[slot], self.computed[slot]
        assert count >= 1
        assert start + count <= len(known), "a token is computed that nobody knows"
        for position in range(start, start + count):
            self.kv[self._place(slot, position)] = known[position]
        self.computed[slot] += count
        if self.computed[slot] < len(known):
            return -1
        history = [self.kv[self._place(slot, position)] for position in range(len(known))]
        known.append(next_token(history))
        return known[-1]

    def _place(self, slot: int, position: int) -> tuple[int, int]:
        page, offset = divmod(position, self.page_size)
        assert page < len(self.pages[slot]), "a token lies past the pages of its slot"
        return self.pages[slot][page], offset


class Detok:
    """Collects what reaches the detokenizer, and checks that each request ends once."""

    def __init__(self) -> None:
        self.open: dict[int, str] = {}
        self.tokens: dict[str, list[int]] = {}
        self.closed: dict[str, CloseText] = {}
        self.stopped = False

    def send(self, message: msgspec.Struct) -> None:
        if not isinstance(message, StepOutput):
            self.stopped = True
            return
        for opened in message.opened:
            self.open[opened.seq] = opened.request_id
            self.tokens[opened.request_id] = []
        for seq, token in zip(message.seqs, unpack_ids(message.token_ids), strict=True):
            self.tokens[self.open[seq]].append(token)
        for closed in message.closed:
            assert closed.request_id not in self.closed, "a request ended twice"
            self.open.pop(closed.seq, None)
            self.closed[closed.request_id] = closed


class World:
    """Scheduler, simulated worker and detokenizer in one."""

    def __init__(self, args: SchedulerArgs, num_pages: int = 64, page_size: int = 4) -> None:
        self.worker = SimulatedWorker(page_size)
        self.detok = Detok()
        self.scheduler = Scheduler(
            args, frozenset({EOS}), self.worker, self.detok, lambda: self.worker.now
        )
        ready = WorkerReady(num_pages, page_size, args.max_running_requests, "float32", "cpu")
        self.scheduler.iterate([], [ready])

    def tell(self, *messages: SchedulerMessage) -> None:
        self.scheduler.iterate(messages, [])
        self.scheduler.check()

    def step(self) -> bool:
        """Run one step of the worker; False where nothing was planned."""
        result = self.worker.run_one()
        if result is None:
            return False
        self.scheduler.iterate([], [result])
        self.scheduler.check()
        return True

    def run(self, most: int = 10_000) -> int:
        """Run until idle; the number of steps."""
        for steps in range(most):
            if not self.step():
                return steps
        raise AssertionError(f"not idle after {most} steps")


def submit(
    request_id: str,
    prompt: list[int],
    max_new_tokens: int = 8,
    client: bytes = b"c",
    ignore_eos: bool = False,
    stop_token_ids: list[int] | None = None,
) -> Submit:
    params = SamplingParams(
        max_new_tokens=max_new_tokens,
        seed=0,
        ignore_eos=ignore_eos,
        stop_token_ids=stop_token_ids or [],
    )
    return Submit(client, request_id, pack_ids(prompt), params, True, 1.0, 2.0)


def abort(request_id: str, client: bytes = b"c") -> AbortRequest:
    return AbortRequest(client, request_id)
