"""A simulated worker and clock, so that the scheduler runs without processes."""

from collections import deque

import msgspec

from quadriga.messages.ids import pack_ids, unpack_ids
from quadriga.messages.to_detok import CloseText, StepOutput
from quadriga.messages.to_scheduler import AbortRequest, SchedulerMessage, Submit
from quadriga.messages.worker import NewSlot, StepPlan, StepResult, WorkerReady
from quadriga.sampling import SamplingParams
from quadriga.scheduler_args import SchedulerArgs
from scheduler_proc.scheduler import Scheduler

EOS = 2


STEP_SECONDS = 0.01


def state_after(state: int, token: int) -> int:
    """What the simulated model keeps of a position: a hash of all tokens up to there."""
    return (state * 31 + token + 11) % 1_000_003


def token_of(state: int, length: int) -> int:
    """The simulated model: a token that depends on all tokens before it; sometimes EOS."""
    value = state + length * 7919
    return EOS if value % 23 == 0 else 3 + value % 97


def reference(prompt: list[int], max_new_tokens: int, ignore_eos: bool) -> list[int]:
    """What the simulated model gives to a request that is alone."""
    history = list(prompt)
    state = 0
    for token in prompt:
        state = state_after(state, token)
    for _ in range(max_new_tokens):
        history.append(token_of(state, len(history)))
        if history[-1] == EOS and not ignore_eos:
            break
        state = state_after(state, history[-1])
    return history[len(prompt) :]


def next_token(prompt: list[int]) -> int:
    return reference(prompt, 1, True)[0]


class SimulatedWorker:
    """Runs plans one at a time, in simulated time, and checks every one of them.

    It keeps the KV of each page and offset, as a real worker does, here a hash of all tokens up to
    there. Whoever attends reads all of its past: a page that is somebody else's, was overwritten
    or was never computed is noticed at once.
    """

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.plans: deque[tuple[float, StepPlan]] = deque()
        self.known: dict[int, list[int]] = {}
        self.states: dict[int, list[int]] = {}
        self.computed: dict[int, int] = {}
        self.pages: dict[int, list[int]] = {}
        self.kv: dict[tuple[int, int], int] = {}
        self.now = 1000.0
        self.free_at = 0.0
        self.stopped = False
        self.rows_of_steps: list[list[int]] = []
        self.tokens_of_steps: list[list[int]] = []
        self.modes: list[int] = []

    def send(self, message: msgspec.Struct) -> None:
        if isinstance(message, StepPlan):
            self.plans.append((self.now, message))
            assert len(self.plans) <= 2, "more than two plans are outstanding"
        else:
            self.stopped = True

    @property
    def done_at(self) -> float | None:
        """When the oldest plan will be finished."""
        return max(self.plans[0][0], self.free_at) + STEP_SECONDS if self.plans else None

    def run_one(self) -> StepResult | None:
        """The result of the oldest plan; None where there is none."""
        done_at = self.done_at
        if done_at is None:
            return None
        _sent, plan = self.plans.popleft()
        for slot in unpack_ids(plan.released):
            del self.known[slot], self.states[slot], self.computed[slot], self.pages[slot]
        for new in plan.new:
            self._admit(new)
        grown = unpack_ids(plan.grown).tolist()
        for slot, page in zip(grown[::2], grown[1::2], strict=True):
            self.pages[slot].append(page)
        slots, counts = unpack_ids(plan.slots).tolist(), unpack_ids(plan.num_tokens).tolist()
        assert len(set(slots)) == len(slots)
        tokens = [self._row(slot, count) for slot, count in zip(slots, counts, strict=True)]
        self.rows_of_steps.append(slots)
        self.tokens_of_steps.append(counts)
        self.modes.append(plan.forward_mode)
        self.now = self.free_at = done_at
        return StepResult(plan.step, pack_ids(tokens), done_at - STEP_SECONDS, done_at)

    def _admit(self, new: NewSlot) -> None:
        assert new.slot not in self.known, f"slot {new.slot} is given to two requests"
        self.known[new.slot] = []
        self.states[new.slot] = []
        for token in unpack_ids(new.token_ids):
            self._learn(new.slot, token)
        assert new.computed < len(self.known[new.slot]), "nothing is left to compute"
        self.computed[new.slot] = new.computed
        self.pages[new.slot] = unpack_ids(new.pages).tolist()

    def _learn(self, slot: int, token: int) -> None:
        states = self.states[slot]
        self.known[slot].append(token)
        states.append(state_after(states[-1] if states else 0, token))

    def _row(self, slot: int, count: int) -> int:
        known, states, start = self.known[slot], self.states[slot], self.computed[slot]
        assert count >= 1
        assert start + count <= len(known), "a token is computed that nobody knows"
        self.computed[slot] = end = start + count
        for position in range(start, end):
            self.kv[self._place(slot, position)] = states[position]
        for position in range(end):
            assert self.kv.get(self._place(slot, position)) == states[position], (
                f"slot {slot} reads KV at {position} that is not its own"
            )
        if end < len(known):
            return -1
        self._learn(slot, token_of(states[-1], len(known)))
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
        self.checked = True
        self.worker = SimulatedWorker(page_size)
        self.detok = Detok()
        self.scheduler = Scheduler(
            args, frozenset({EOS}), self.worker, self.detok, lambda: self.worker.now
        )
        ready = WorkerReady(num_pages, page_size, args.max_running_requests, "float32", "cpu")
        self.scheduler.iterate([], [ready])

    def tell(self, *messages: SchedulerMessage) -> None:
        self.scheduler.iterate(messages, [])
        self._check()

    def step(self) -> bool:
        """Run one step of the worker, waking the scheduler meanwhile when it wants to be woken;
        False where nothing was planned."""
        done_at = self.worker.done_at
        if done_at is None:
            return False
        self.wake(done_at)
        result = self.worker.run_one()
        assert result is not None
        self.scheduler.iterate([], [result])
        self._check()
        return True

    def wake(self, until: float) -> None:
        """Let simulated time pass."""
        while self.scheduler.wake_at is not None and self.scheduler.wake_at <= until:
            self.worker.now = max(self.worker.now, self.scheduler.wake_at)
            woken, self.scheduler.wake_at = self.scheduler.wake_at, None
            self.scheduler.iterate([], [])
            assert self.scheduler.wake_at != woken, "the scheduler would be woken for ever"
        self.worker.now = max(self.worker.now, until)

    def _check(self) -> None:
        if self.checked:
            self.scheduler.check()

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
    **fields: float,
) -> Submit:
    params = SamplingParams(
        max_new_tokens=max_new_tokens,
        seed=0,
        ignore_eos=ignore_eos,
        stop_token_ids=stop_token_ids or [],
    )
    return Submit(client, request_id, pack_ids(prompt), params, True, 1000.0, 1000.0, **fields)  # type: ignore[arg-type]


def abort(request_id: str, client: bytes = b"c") -> AbortRequest:
    return AbortRequest(client, request_id)
