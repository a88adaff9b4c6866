"""A scheduler whose worker and detokenizer only record what it sends to them."""

from collections import deque
from typing import Any

import msgspec

from quadriga.sampling.params import SamplingParams
from quadriga.server.config.engine_args import SchedulerArgs
from quadriga.wire.grammar import GrammarForm
from quadriga.wire.packing import pack_ids, unpack_ids
from quadriga.wire.to_detok import StepOutput
from quadriga.wire.to_scheduler import Submit
from quadriga.wire.worker import GrammarReady, StepPlan, StepResult, WorkerReady
from scheduler_proc.journal.writer import NoJournal
from scheduler_proc.scheduler import Scheduler
from tests.unit.simulation import abort

PROMPT = list(range(10, 30))


class RecordingSender:
    def __init__(self) -> None:
        self.sent: deque[Any] = deque()

    def send(self, message: msgspec.Struct) -> None:
        self.sent.append(message)


class Bench:
    """A scheduler whose worker answers step by step; pages have 4 tokens."""

    def __init__(self, **args: Any) -> None:
        self.worker, self.detok = RecordingSender(), RecordingSender()
        flags = {"plan_at_once": True, **args}
        self.scheduler = Scheduler(
            SchedulerArgs(**flags),
            frozenset({2}),
            self.worker,
            self.detok,
            lambda: 1000.0,
            NoJournal(),
        )
        self.scheduler.step([], [WorkerReady(64, 4, 16, "float32", "cpu")])

    def submit(self, client_retry: bool = False, **fields: Any) -> None:
        params = SamplingParams(**{"max_new_tokens": 2, "seed": 7, **fields})
        message = Submit(
            b"c", "r", pack_ids(PROMPT), params, True, 1.0, 1.0, client_retry=client_retry
        )
        self.scheduler.step([message], [])

    def plan(self) -> StepPlan:
        plan = self.worker.sent.popleft()
        assert isinstance(plan, StepPlan)
        return plan

    def answer(self, plan: StepPlan, tokens: list[int], **fields: Any) -> list[StepOutput]:
        result = StepResult(plan.step, pack_ids(tokens), 1.0, 2.0, **fields)
        self.scheduler.step([], [result])
        outputs, self.detok.sent = list(self.detok.sent), deque()
        return outputs


GRAMMAR = GrammarForm.of("start: /a+/")


class GrammarBench(Bench):
    def ask(self, name: str, grammar: GrammarForm | None = GRAMMAR, **fields: Any) -> None:
        params = SamplingParams(max_new_tokens=4, seed=7, **fields)
        ids = pack_ids(PROMPT)
        message = Submit(b"c", name, ids, params, True, 1.0, 1.0, grammar=grammar)
        self.scheduler.step([message], [])

    def ready(self, error: str = "", key: bytes = GRAMMAR.key) -> list[StepOutput]:
        self.scheduler.step([], [GrammarReady(key, error)])
        outputs, self.detok.sent = list(self.detok.sent), type(self.detok.sent)()
        return outputs

    def end_all(self) -> None:
        self.scheduler.step([abort("")], [])
        while self.worker.sent:
            message = self.worker.sent.popleft()
            if isinstance(message, StepPlan):
                self.answer(message, [5] * len(unpack_ids(message.slots)))
