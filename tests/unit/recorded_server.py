"""A scheduler between a simulated worker and a simulated detokenizer.

What goes to the scheduler is decoded from msgpack arrays. All times are whole microseconds, which
makes every run the same on every machine.
"""

import math
from collections.abc import Callable, Iterable
from heapq import heappop, heappush
from itertools import count
from typing import Any, Protocol

import msgspec

from quadriga.wire.packing import num_ids, pack_floats, pack_ids, unpack_ids
from quadriga.wire.sockets import encode
from quadriga.wire.to_detok import DetokMessage, StepOutput
from quadriga.wire.to_scheduler import SchedulerMessage
from quadriga.wire.worker import (
    CompileGrammar,
    NewSlot,
    ResultMessage,
    StepPlan,
    WantedLogprobs,
    WorkerMessage,
)
from tests.unit.decision_log import DecisionLog

Wire = list[Any]  # a message as msgpack has it: its tag, then its fields

START_S = 1000
EOS = 2
NUM_IDS = 1000
COMPILE_US = 3000
RESULT_US = 100
ACKNOWLEDGE_US = 200
MAX_EVENTS = 100_000  # a run ends long before, unless the scheduler is woken for ever

_decode_message = msgspec.msgpack.Decoder(SchedulerMessage).decode
_decode_result = msgspec.msgpack.Decoder(ResultMessage).decode


class SchedulerLike(Protocol):
    """The part of a scheduler that a run needs."""

    def step(self, messages: Iterable[Any], results: Iterable[Any]) -> float | None: ...


class Tap:
    """A link that passes each message on as its receiver decodes it.

    Args:
        take: called with each message.
        message_type: what the receiver decodes.
    """

    def __init__(self, take: Callable[[Any], object], message_type: Any) -> None:
        self._take = take
        self._decode = msgspec.msgpack.Decoder(message_type).decode

    def send(self, message: msgspec.Struct) -> None:
        self._take(self._decode(encode(message)))


class Server:
    """Run a scheduler over simulated time, and log what it sends.

    Attributes:
        scheduler: set by the caller, with `worker`, `detok` and `clock` of this server.
        stops: tokens after which the detokenizer finds a stop string, by request id.
    """

    scheduler: SchedulerLike

    def __init__(self, log: DecisionLog, start_us: int = 0) -> None:
        self.worker = Tap(self._on_worker_message, WorkerMessage)
        self.detok = Tap(self._on_detok_message, DetokMessage)
        self.stops: dict[str, int] = {}
        self._log = log
        self._now_us = start_us
        self._events: list[tuple[int, int, str, Any]] = []
        self._order = count()
        self._wake_us: int | None = None
        self._engine = SimulatedEngine(start_us)
        self._names: dict[int, str] = {}

    def clock(self) -> float:
        """Return the simulated time in Unix seconds."""
        return _seconds(self._now_us)

    def send(self, at_us: int, message: Wire) -> None:
        """Deliver a message to the scheduler at a time."""
        self._at(at_us, "message", message)

    def report(self, at_us: int, result: Wire) -> None:
        """Deliver a message of the worker to the scheduler at a time."""
        self._at(at_us, "result", result)

    def run(self, until_us: float = math.inf) -> None:
        """Run until nothing is left to do, or until a time."""
        for _ in range(MAX_EVENTS):
            if not self._events or self._events[0][0] > until_us:
                return
            self._round()
        raise AssertionError(f"the run is not over after {MAX_EVENTS} rounds")

    def _round(self) -> None:
        """Advance to the time of the next event, and run the scheduler once."""
        self._now_us = self._events[0][0]
        messages, results, is_woken = [], [], False
        while self._events and self._events[0][0] == self._now_us:
            _, _, kind, subject = heappop(self._events)
            if kind == "message":
                messages.append(_decode_message(encode(subject)))
            elif kind == "result":
                results.append(_decode_result(encode(subject)))
            elif subject == self._wake_us:
                self._wake_us, is_woken = None, True
        if not (messages or results or is_woken):
            return
        self._wake(self.scheduler.step(messages, results))

    def _wake(self, when: float | None) -> None:
        """Set the time of the next round without a message, in place of an earlier one."""
        self._wake_us = None
        if when is None or when == math.inf:
            return
        at_us = max(self._now_us + 1, math.floor((when - START_S) * 1e6))
        while _seconds(at_us) < when:
            at_us += 1
        self._wake_us = at_us
        self._at(at_us, "wake", at_us)

    def _at(self, at_us: int, kind: str, subject: Any) -> None:
        heappush(self._events, (at_us, next(self._order), kind, subject))

    # --- what the scheduler sends -----------------------------------------------------------------

    def _on_worker_message(self, message: WorkerMessage) -> None:
        self._log.observe(message, self._now_us)
        if isinstance(message, StepPlan):
            at_us, result = self._engine.run(message, self._now_us)
            self.report(at_us, result)
        elif isinstance(message, CompileGrammar):
            error = "the grammar is empty" if message.grammar.text == "empty" else ""
            result = ["grammar", message.grammar.key, error]
            self.report(self._now_us + COMPILE_US, result)

    def _on_detok_message(self, message: DetokMessage) -> None:
        self._log.observe(message, self._now_us)
        if not isinstance(message, StepOutput):
            return
        for opening in message.opened:
            if opening.request_id in self.stops:
                self._names[opening.seq] = opening.request_id
        stopped = []
        for seq in message.seqs:
            name = self._names.get(seq, "")
            if name:
                self.stops[name] -= 1
                if self.stops[name] == 0:
                    stopped.append(seq)
        if stopped:
            self.send(self._now_us + ACKNOWLEDGE_US, ["stop_found", stopped])
        replayed = [replay.closing for replay in message.replayed if replay.closing is not None]
        ended = {closing.seq: closing.placement for closing in (*message.closed, *replayed)}
        if ended:
            self.send(self._now_us + ACKNOWLEDGE_US, ["ended", ended])


class SimulatedEngine:
    """Answer plans with tokens that depend on the seed of a request and on the position."""

    def __init__(self, free_us: int) -> None:
        self._slots: dict[int, Slot] = {}
        self._free_us = free_us

    def run(self, plan: StepPlan, now_us: int) -> tuple[int, Wire]:
        """Run a plan.

        Returns:
            The microsecond at which the scheduler has the result, and the result.
        """
        for new in plan.new:
            self._slots[new.slot] = Slot(new)
        rows = list(zip(unpack_ids(plan.slots), unpack_ids(plan.num_tokens), strict=True))
        began = max(now_us + 20, self._free_us)
        self._free_us = ended = began + 3000 + 5 * len(rows) + 15 * sum(n for _, n in rows)
        pieces = []
        for row, (slot, num) in enumerate(rows):
            block = self._slots[slot].prompt_block(num)
            if block is not None:
                pieces.append([row, block])
        tokens = [self._slots[slot].compute(num) for slot, num in rows]
        logprobs = self._logprobs(rows, tokens)
        times = [_seconds(began), _seconds(ended)]
        result = ["result", plan.step, pack_ids(tokens), *times, logprobs, pieces, [], plan.session]
        return ended + RESULT_US, result

    def _logprobs(self, rows: list[tuple[int, int]], tokens: list[int]) -> Wire | None:
        """Return the logprobs of the sampled tokens whose clients want them."""
        rows_with_logprobs = [
            (row, self._slots[slot])
            for row, (slot, _) in enumerate(rows)
            if tokens[row] >= 0 and self._slots[slot].logprobs is not None
        ]
        if not rows_with_logprobs:
            return None
        width = max(slot.logprobs or 0 for _, slot in rows_with_logprobs)
        places = [slot.known - 1 for _, slot in rows_with_logprobs]
        return [pack_ids(row for row, _ in rows_with_logprobs), _block(places, width)]


class Slot:
    """The state of one slot: token counts, and which logprobs are wanted."""

    def __init__(self, new: NewSlot) -> None:
        self.computed, self.seed, rules = new.computed, new.seed, new.rules
        self.known = num_ids(new.token_ids)
        self.num_prompt = 0 if rules is None else rules.num_prompt
        wanted = None if rules is None else rules.logprobs
        assert not isinstance(wanted, WantedLogprobs), "the traces ask for likeliest tokens only"
        self.logprobs = wanted
        self.prompt_logprobs = None if rules is None else rules.prompt_logprobs

    def prompt_block(self, num_tokens: int) -> Wire | None:
        """Return the logprobs of the prompt tokens after the next ones to compute."""
        if self.prompt_logprobs is None:
            return None
        first = self.computed + 1
        last = min(first + num_tokens, self.num_prompt)
        return _block(list(range(first, last)), self.prompt_logprobs) if first < last else None

    def compute(self, num_tokens: int) -> int:
        """Compute the next tokens; return the sampled one, or -1 where some are still left."""
        self.computed += num_tokens
        assert self.computed <= self.known, "a token is computed that is not known"
        if self.computed < self.known:
            return -1
        self.known += 1
        mixed = (self.seed * 1_000_003 + self.known) * 2_654_435_761 & 0x7FFF_FFFF_FFFF
        value = mixed >> 13
        return EOS if value % 41 == 0 else 3 + value % (NUM_IDS - 3)


def _block(positions: list[int], width: int) -> Wire:
    """Return logprobs of the tokens at these positions, exact in float32."""
    top = [(position, rank) for position in positions for rank in range(width)]
    return [
        pack_floats(-position / 8 for position in positions),
        width,
        pack_ids(3 + (position + rank) % 97 for position, rank in top),
        pack_floats(-position / 8 - rank for position, rank in top),
    ]


def _seconds(us: int) -> float:
    return START_S + us / 1e6
