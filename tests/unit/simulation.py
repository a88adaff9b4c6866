"""A simulated worker, detokenizer and clock, so that the scheduler runs without processes."""

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from quadriga.sampling.params import SamplingParams
from quadriga.sampling.pooling import Pooling
from quadriga.server.config.engine_args import SchedulerArgs
from quadriga.wire.packing import pack_floats, pack_ids, unpack_ids
from quadriga.wire.to_detok import (
    Drained,
    MovableChoice,
    StepOutput,
    StoredPrompt,
    StreamEnd,
    StreamReplay,
)
from quadriga.wire.to_scheduler import (
    AbortRequest,
    DetokReady,
    EndsDelivered,
    SchedulerMessage,
    Submit,
)
from quadriga.wire.worker import (
    NO_ADAPTER,
    AdapterReady,
    EvictAdapter,
    ForcedRow,
    ForgetAdapter,
    GuessedRow,
    LoadAdapter,
    NewSlot,
    ResultMessage,
    StepPlan,
    StepResult,
    VectorRow,
    WorkerReady,
)
from scheduler_proc.journal.writer import NoJournal
from scheduler_proc.pause import STORE_TIMEOUT_S
from scheduler_proc.pipeline import MAX_TOTAL_DELAY_S
from scheduler_proc.scheduler import Scheduler

EOS = 2
JUMPING = 100  # a prompt that begins so has a grammar, which forces tokens now and then
STEP_S = 0.01


def state_after(state: int, token: int) -> int:
    """Return the KV of a position in the simulated model: a hash of all tokens up to there."""
    return (state * 31 + token + 11) % 1_000_003


def token_of(state: int, length: int) -> int:
    """Return the next token, which depends on all tokens before it; sometimes EOS."""
    value = state + length * 7919
    return EOS if value % 23 == 0 else 3 + value % 97


def forced_after(first: int, state: int) -> list[int]:
    """Return the tokens that a grammar forces to follow, for a request that begins with `first`."""
    return [3 + (state + i) % 97 for i in range(state % 6)] if first == JUMPING else []


def first_state(adapter: str) -> int:
    """Return the state before the first token, which the adapter of this id changes; "": none."""
    return int.from_bytes(adapter.encode(), "big") % 1_000_003


def reference(
    prompt: list[int], max_new_tokens: int, ignore_eos: bool, adapter: str = ""
) -> list[int]:
    """Return what the simulated model generates for a request that runs alone."""
    history = list(prompt)
    state = first_state(adapter)
    for token in prompt:
        state = state_after(state, token)
    while len(history) < len(prompt) + max_new_tokens:
        history.append(token_of(state, len(history)))
        if history[-1] == EOS and not ignore_eos:
            break
        state = state_after(state, history[-1])
        for token in forced_after(history[0], state):
            history.append(token)
            state = state_after(state, token)
    return history[len(prompt) :][:max_new_tokens]


def vector_of(prompt: list[int]) -> bytes:
    """Return the vector of a prompt: the state after it, and its length."""
    state = 0
    for token in prompt:
        state = state_after(state, token)
    return pack_floats([state, len(prompt)])


def next_token(prompt: list[int]) -> int:
    return reference(prompt, 1, True)[0]


class SimulatedWorker:
    """Run plans one at a time, in simulated time, and check each of them.

    It keeps the KV of each page and offset, as a real worker does, here a hash of all tokens up to
    there. A row that attends reads all that its tokens see, after all rows have written, so that a
    page of another request, an overwritten one or one that was never computed is noticed at once.

    Attributes:
        window: number of tokens, itself included, that a token sees; 0: all.
        poison: tokens that crash the worker, as `meets_poison` says.
        fetches: pages can be loaded from other workers.
    """

    fetches = False

    def __init__(self, page_size: int, window: int = 0) -> None:
        self.page_size = page_size
        self.window = window
        self.plans: deque[tuple[float, StepPlan]] = deque()
        self.known: dict[int, list[int]] = {}
        self.states: dict[int, list[int]] = {}
        self.computed: dict[int, int] = {}
        self.pages: dict[int, list[int]] = {}
        self.kv: dict[tuple[int, int], int] = {}
        self.jumped: set[int] = set()
        self.poolings: dict[int, Pooling] = {}
        self.loads: deque[LoadAdapter] = deque()
        self.adapters: dict[int, str] = {}  # by place
        self.in_memory: set[str] = set()  # ids
        self.forgotten: dict[int, int] = {}  # places, and how many plans come before
        self.adapter_of: dict[int, str] = {}  # by slot
        self.now = 1000.0
        self.free_at = 0.0
        self.stopped = False
        self.session = 0
        self.poison: frozenset[int] = frozenset()
        self.rows_of_steps: list[list[int]] = []
        self.tokens_of_steps: list[list[int]] = []
        self.modes: list[int] = []

    def send(self, message: msgspec.Struct) -> None:
        if isinstance(message, StepPlan):
            assert message.session == self.session, "a plan for a worker that has crashed"
            self.plans.append((self.now, message))
            assert len(self.plans) <= 2, "more than two plans are outstanding"
        elif isinstance(message, LoadAdapter):
            assert message.session == self.session
            places = {load.place for load in self.loads} | self.adapters.keys()
            free = message.place not in places or message.place in self.forgotten
            assert free, "a place is given to two adapters"
            self.loads.append(message)
            self.in_memory.add(message.adapter.id)
        elif isinstance(message, EvictAdapter):
            places = {place for place in self.adapters if place not in self.forgotten}
            assert message.id not in {self.adapters[place] for place in places}
            self.in_memory.remove(message.id)
        elif isinstance(message, ForgetAdapter):
            self.loads = deque(load for load in self.loads if load.place != message.place)
            self.forgotten[message.place] = len(self.plans)
            self._forget_adapters(0)
        else:
            self.stopped = True

    def finish_loads(self) -> list[AdapterReady]:
        """Load the adapters that were asked for, as far as their places are free."""
        loaded = [load for load in self.loads if load.place not in self.forgotten]
        self.loads = deque(load for load in self.loads if load.place in self.forgotten)
        self.adapters |= {load.place: load.adapter.id for load in loaded}
        return [AdapterReady(load.adapter.id, load.place, "", load.session) for load in loaded]

    def _forget_adapters(self, num_run: int) -> None:
        """Free places behind the plans that were sent before. num_run: plans that have run."""
        for place in list(self.forgotten):
            self.forgotten[place] -= num_run
            if self.forgotten[place] <= 0:
                del self.forgotten[place]
                self.adapters.pop(place, None)

    def stored_names(self) -> bytes | None:
        """Return the names of all pages in tiers beyond the pool; None without tiers."""
        return None

    @property
    def done_at(self) -> float | None:
        """Time at which the oldest plan is finished; None without one."""
        return max(self.plans[0][0], self.free_at) + STEP_S if self.plans else None

    def run_one(self) -> StepResult | None:
        """Run the oldest plan and return its result; None without a plan."""
        done_at = self.done_at
        if done_at is None:
            return None
        _sent, plan = self.plans.popleft()
        for slot in unpack_ids(plan.released):
            del self.known[slot], self.states[slot], self.computed[slot], self.pages[slot]
            del self.adapter_of[slot]
            self.poolings.pop(slot, None)
        for new in plan.new:
            self._admit(new)
        grown = unpack_ids(plan.grown).tolist()
        for slot, page in zip(grown[::2], grown[1::2], strict=True):
            self.pages[slot].append(page)
        slots, counts = unpack_ids(plan.slots).tolist(), unpack_ids(plan.num_tokens).tolist()
        assert len(set(slots)) == len(slots)
        starts = [self.computed[slot] for slot in slots]
        written: set[tuple[int, int]] = set()
        for slot, count in zip(slots, counts, strict=True):
            self._write_row(slot, count, written)
        tokens = [self._read_row(slot, start) for slot, start in zip(slots, starts, strict=True)]
        vectors = [
            VectorRow(row, vector_of(self.known[slot]))
            for row, slot in enumerate(slots)
            if slot in self.poolings and self.computed[slot] == len(self.known[slot])
        ]
        guessed = self._guess_rows(plan, tokens)
        forced = [
            ForcedRow(row, pack_ids(ids))
            for row, slot in enumerate(slots)
            if tokens[row] >= 0 and (ids := self._jump(slot))
        ]
        self._forget_adapters(1)
        self.rows_of_steps.append(slots)
        self.tokens_of_steps.append(counts)
        self.modes.append(plan.forward_mode)
        self.now = self.free_at = done_at
        began, session = done_at - STEP_S, self.session
        return StepResult(
            plan.step, pack_ids(tokens), began, done_at, session=session, forced=forced,
            guessed=guessed, vectors=vectors,
        )  # fmt: skip

    def meets_poison(self) -> bool:
        """Return whether the oldest plan computes a slot that has a token of `poison`."""
        plan = self.plans[0][1]
        known = {new.slot: unpack_ids(new.token_ids).tolist() for new in plan.new}
        slots = unpack_ids(plan.slots).tolist()
        return any(self.poison & set(known.get(s) or self.known[s]) for s in slots)

    def restart(self) -> None:
        """Lose all state, as a new worker does."""
        self.session += 1
        for lost in (self.plans, self.known, self.states, self.computed, self.pages, self.kv):
            lost.clear()
        for also in (self.loads, self.adapters, self.adapter_of, self.forgotten):
            also.clear()
        self.in_memory.clear()
        self.poolings.clear()
        self.free_at = self.now

    def _admit(self, new: NewSlot) -> None:
        assert new.slot not in self.known, f"slot {new.slot} is given to two requests"
        self.jumped.discard(new.slot)
        self.known[new.slot] = []
        place = new.adapter
        assert place == NO_ADAPTER or place in self.adapters, f"no adapter is in place {place}"
        self.adapter_of[new.slot] = "" if place == NO_ADAPTER else self.adapters[place]
        self.states[new.slot] = []
        for token in unpack_ids(new.token_ids):
            self._append(new.slot, token)
        assert new.computed < len(self.known[new.slot]), "nothing is left to compute"
        self.computed[new.slot] = new.computed
        if new.pooling is not None:
            self.poolings[new.slot] = new.pooling
        self.pages[new.slot] = unpack_ids(new.pages).tolist()

    def _append(self, slot: int, token: int) -> None:
        states = self.states[slot]
        self.known[slot].append(token)
        state = states[-1] if states else first_state(self.adapter_of[slot])
        states.append(state_after(state, token))

    def _jump(self, slot: int) -> list[int]:
        forced = forced_after(self.known[slot][0], self.states[slot][-1])
        for token in forced:
            self._append(slot, token)
        if forced:
            self.jumped.add(slot)
        return forced

    def _write_row(self, slot: int, count: int, written: set[tuple[int, int]]) -> None:
        known, states, start = self.known[slot], self.states[slot], self.computed[slot]
        if slot in self.jumped:
            count = min(len(known), len(self.pages[slot]) * self.page_size) - start
        assert count >= 1
        assert start + count <= len(known), "a token is computed that is not known"
        self.computed[slot] = end = start + count
        for position in range(start, end):
            location = self._location(slot, position)
            assert location not in written, "two rows of a step write to one place"
            written.add(location)
            self.kv[location] = states[position]

    def _read_row(self, slot: int, start: int) -> int:
        known, states, end = self.known[slot], self.states[slot], self.computed[slot]
        first = max(0, start + 1 - self.window) if self.window else 0
        for position in range(first, end):
            assert self.kv.get(self._location(slot, position)) == states[position], (
                f"slot {slot} reads KV at {position} that is not its own"
            )
        if slot in self.poolings:
            num_read = self.poolings[slot].num_read or len(known)
            assert num_read == 1 or (end == len(known) and end - start >= num_read), (
                "a step does not compute all tokens that a vector is made of"
            )
        if end < len(known) or slot in self.poolings:
            return -1
        self._append(slot, token_of(states[-1], len(known)))
        return known[-1]

    def _guess_rows(self, plan: StepPlan, tokens: list[int]) -> list[GuessedRow]:
        """Guess in the rows that sampled; some guesses are right, and wrong ones leave their KV."""
        if not plan.num_guesses:
            return []
        rows = zip(unpack_ids(plan.slots), unpack_ids(plan.num_guesses), strict=True)
        return [
            GuessedRow(row, count, pack_ids(self._guess(slot, count)))
            for row, (slot, most) in enumerate(rows)
            if tokens[row] >= 0 and (count := min(most, self._room_for_guesses(slot))) > 0
        ]

    def _room_for_guesses(self, slot: int) -> int:
        reach = len(self.pages[slot]) * self.page_size - 1
        return reach - self.computed[slot]

    def _guess(self, slot: int, count: int) -> list[int]:
        """Return the tokens that follow right guesses, and spoil the places of wrong ones."""
        states, start = self.states[slot], self.computed[slot]
        num_right = (states[-1] // 7) % (count + 1)
        if self.known[slot][0] == JUMPING:
            num_right = 0  # what its grammar forces comes instead
        further = []
        for position in range(start, start + count):
            location = self._location(slot, position)
            if position >= start + num_right:
                self.kv[location] = -1
                continue
            self.kv[location] = states[position]
            self._append(slot, token_of(states[-1], len(self.known[slot])))
            self.computed[slot] = position + 1
            further.append(self.known[slot][-1])
        return further

    def _location(self, slot: int, position: int) -> tuple[int, int]:
        page, offset = divmod(position, self.page_size)
        assert page < len(self.pages[slot]), "a token lies past the pages of its slot"
        return self.pages[slot][page], offset


class Detok:
    """Collect what reaches the detokenizer, and check that each request ends once.

    Attributes:
        awaiting_replay: ids of requests whose clients have asked for a replay.
        may_lose_work: a journal may be lost, so that a replay may be shorter than the stream.
        drained: the Drained messages.
        movable: the choices that other replicas can go on with.
        stored: the beginnings of prompts that they can load.
    """

    def __init__(self) -> None:
        self.open: dict[int, str] = {}
        self.tokens: dict[str, list[int]] = {}
        self.closed: dict[str, StreamEnd] = {}
        self.replayed: list[StreamReplay] = []
        self.awaiting_replay: set[str] = set()
        self.may_lose_work = False
        self.ended: dict[int, int] = {}
        self.drained: list[Drained] = []
        self.movable: list[MovableChoice] = []
        self.stored: list[StoredPrompt] = []
        self.session = 0
        self.stopped = False

    def send(self, message: msgspec.Struct) -> None:
        if isinstance(message, Drained):
            if self.session >= 0:
                self.drained.append(message)
            return
        if not isinstance(message, StepOutput):
            self.stopped = True
            return
        if message.session != self.session:
            return
        if message.news is not None:
            self.movable += message.news.movable
            self.stored += message.news.stored
        for replay in message.replayed:
            self._take_replay(replay)
        for opened in message.opened:
            self.open[opened.seq] = opened.request_id
            self.tokens[opened.request_id] = unpack_ids(opened.given_ids).tolist()
        for seq, token in zip(message.seqs, unpack_ids(message.token_ids), strict=True):
            if seq in self.open:  # else its replay is on its way
                self.tokens[self.open[seq]].append(token)
        for closed in message.closed:
            assert closed.request_id not in self.closed, "a request ended twice"
            self.open.pop(closed.seq, None)
            self.closed[closed.request_id] = closed
            self.ended[closed.seq] = closed.placement

    def _take_replay(self, replay: StreamReplay) -> None:
        """Check that the stream up to now is a beginning of the replay, and take it over."""
        self.replayed.append(replay)
        name, tokens = replay.opening.request_id, unpack_ids(replay.token_ids).tolist()
        self.awaiting_replay.discard(name)
        before = self.tokens.get(name, [])
        known = min(len(before), len(tokens)) if self.may_lose_work else len(before)
        assert tokens[:known] == before[:known]
        self.open[replay.opening.seq] = name
        self.tokens[name] = tokens
        if replay.closing is not None:
            self.open.pop(replay.closing.seq)
            self.closed[name] = replay.closing
            self.ended[replay.closing.seq] = replay.closing.placement


Observe = Callable[[str, msgspec.Struct], object]  # gets the name of a link, and a message on it


class ObservedLink:
    """A link that shows each message to an observer before it passes it on."""

    def __init__(self, name: str, link: SimulatedWorker | Detok, observe: Observe) -> None:
        self._name = name
        self._link = link
        self._observe = observe

    def send(self, message: msgspec.Struct) -> None:
        self._observe(self._name, message)
        self._link.send(message)


class World:
    """Scheduler, simulated worker and detokenizer in one.

    The worker guesses tokens only with `can_guess`: without guesses a step brings a token for each
    of its rows, which most tests count on.
    """

    worker_class: type[SimulatedWorker] = SimulatedWorker

    def __init__(
        self,
        args: SchedulerArgs,
        num_pages: int = 64,
        page_size: int = 4,
        prefill_tokens: int = 256,
        observe: Observe | None = None,
        window: int = 0,
        can_guess: bool = False,
    ) -> None:
        self.checked = True
        self.worker = self.worker_class(page_size, window)
        self.detok = Detok()
        worker: SimulatedWorker | ObservedLink = self.worker
        detok: Detok | ObservedLink = self.detok
        if observe is not None:
            worker = ObservedLink("worker", self.worker, observe)
            detok = ObservedLink("detok", self.detok, observe)
        self.scheduler = Scheduler(
            args, frozenset({EOS}), worker, detok, lambda: self.worker.now, NoJournal()
        )
        self._max_in_memory = args.num_loras_in_memory
        self._ready = WorkerReady(
            num_pages,
            page_size,
            args.max_running_requests,
            "float32",
            "cpu",
            prefill_tokens=prefill_tokens,
            window=window,
            can_guess=can_guess,
            stored=self.worker.stored_names(),
            fetches=self.worker.fetches,
        )
        self.wake_at: float | None = None
        self.schedule([], [self._ready])
        self.num_crashes = 0
        self._detok_sessions = 0

    def schedule(
        self, messages: Iterable[SchedulerMessage] = (), results: Iterable[ResultMessage] = ()
    ) -> None:
        self.wake_at = self.scheduler.step(messages, results)

    def send(self, *messages: SchedulerMessage) -> None:
        """Deliver messages to the scheduler."""
        self.schedule(messages, [])
        self._acknowledge()
        self._check()

    def step(self) -> bool:
        """Run one step of the worker, and wake the scheduler meanwhile as often as it wants.

        Return False where nothing was planned.
        """
        if loaded := self.worker.finish_loads():
            self.schedule([], loaded)
            return True
        if self.worker.done_at is None:
            self.pass_batch_delay()
        done_at = self.worker.done_at
        if done_at is None:
            return False
        self.wake(done_at)
        if self.worker.poison and self.worker.meets_poison():
            self.restart_worker()
            return True
        result = self.worker.run_one()
        assert result is not None
        self.schedule([], [result])
        self._acknowledge()
        self._check()
        return True

    def pass_batch_delay(self) -> None:
        """Let the batch delay pass without further requests: an idle worker gets its step."""
        self.wake(self.worker.now + MAX_TOTAL_DELAY_S)

    def _acknowledge(self) -> None:
        """Acknowledge the ends that the detokenizer has received."""
        if self.detok.ended:
            ended, self.detok.ended = self.detok.ended, {}
            self.schedule([EndsDelivered(ended, self.scheduler.lifecycle.outbox.session)], [])

    def kill_detok(self) -> None:
        """Crash the detokenizer: messages to it get lost."""
        self._detok_sessions += 1
        self.detok.session = -1

    def restart_detok(self) -> None:
        """Start another detokenizer."""
        self.detok.session = self._detok_sessions
        self.detok.open.clear()
        self.schedule([DetokReady(self.detok.session)], [])
        self._acknowledge()
        self._check()

    def restart_worker(self, started_at: int | None = None) -> None:
        """Crash the worker and start another one; started_at: as in WorkerReady."""
        self.num_crashes += 1
        late_result = self.worker.run_one() if self.num_crashes % 2 else None
        self.worker.restart()
        ready = msgspec.structs.replace(
            self._ready,
            session=self.worker.session,
            stored=self.worker.stored_names(),
            started_at=self.worker.session if started_at is None else started_at,
        )
        self.schedule([], [ready] if late_result is None else [ready, late_result])
        self._check()

    def suspend_worker(self) -> None:
        """End the worker once the scheduler has paused, and start another one."""
        self.scheduler.pause.begin(self.worker.session)
        self.schedule()
        while not self.scheduler.pause.is_complete:
            if not self.step():
                self.wake(self.worker.now + STORE_TIMEOUT_S)
        assert self.scheduler.pipeline.idle
        self.restart_worker()

    def wake(self, until: float) -> None:
        """Let simulated time pass."""
        while self.wake_at is not None and self.wake_at <= until:
            woken = self.wake_at
            self.worker.now = max(self.worker.now, woken)
            self.schedule()
            assert self.wake_at != woken, "the scheduler would be woken for ever"
        self.worker.now = max(self.worker.now, until)

    def _check(self) -> None:
        if self.checked:
            self.scheduler.check()
            assert len(self.worker.in_memory) <= self._max_in_memory

    def run(self, max_steps: int = 10_000) -> int:
        """Run until idle. Return the number of steps."""
        for steps in range(max_steps):
            if not self.step():
                return steps
        raise AssertionError(f"not idle after {max_steps} steps")


def submit(
    request_id: str,
    prompt: list[int],
    max_new_tokens: int = 8,
    client: bytes = b"c",
    ignore_eos: bool = False,
    stop_token_ids: list[int] | None = None,
    first_token_ids: list[int] | None = None,
    **fields: Any,
) -> Submit:
    params = SamplingParams(
        max_new_tokens=max_new_tokens,
        seed=0,
        ignore_eos=ignore_eos,
        stop_token_ids=stop_token_ids or [],
        first_token_ids=first_token_ids or [],
    )
    return Submit(client, request_id, pack_ids(prompt), params, True, 1000.0, 1000.0, **fields)


def abort(request_id: str, client: bytes = b"c") -> AbortRequest:
    return AbortRequest(client, request_id)
