"""What every rank of the worker does with a message."""

from collections.abc import Callable
from dataclasses import dataclass

from quadriga.wire.grammar import GrammarForm
from quadriga.wire.worker import (
    NO_ADAPTER,
    CompileGrammar,
    EvictAdapter,
    ForgetAdapter,
    ForgetGrammar,
    LoadAdapter,
    LoadPages,
    ResetWorker,
    ResultMessage,
    StepPlan,
    StorePages,
    WorkerMessage,
)
from worker_proc.adapters.loader import AdapterLoader
from worker_proc.kv_tiers.page_mover import PageMover
from worker_proc.result_sender import Wait
from worker_proc.sampling.grammar_compiler import GrammarCompiler
from worker_proc.step.runner import Runner


def is_stale(message: WorkerMessage, session: int) -> bool:
    """Return whether a message is about slots, pages or adapters of another session.

    Such a message was on its way to the worker before this one, or is of a scheduler that has died.
    """
    of_session = StepPlan | StorePages | LoadPages | LoadAdapter | ForgetAdapter | EvictAdapter
    return isinstance(message, of_session) and message.session != session


@dataclass(frozen=True, slots=True)
class Rank:
    """Handles messages. Rank 0 alone answers the scheduler.

    Attributes:
        runner: runs the steps.
        grammars: the compiled grammars.
        compile_grammar: compiles one: rank 0 in a thread, as the scheduler waits for its answer;
            the others at once, since a plan may need the grammar as soon as rank 0 has answered.
        adapters: reads adapters for the engine.
        send: takes the function that waits for a launched step.
        mover: moves pages between the pool and the tiers beyond it; None without tiers.
    """

    runner: Runner
    grammars: GrammarCompiler
    compile_grammar: Callable[[GrammarForm], object]
    adapters: AdapterLoader
    send: Callable[[Wait], None]
    mover: PageMover | None = None

    def handle(self, message: WorkerMessage) -> None:
        """Do what a message asks for; StopWorker is left to the caller."""
        match message:
            case StepPlan():
                self._take_adapters(message)
                if self.mover is None:
                    self.send(self.runner.launch(message))
                else:
                    self.mover.before_step(message)
                    self.send(_then(self.runner.launch(message), self.mover.after_step))
            case CompileGrammar():
                self.compile_grammar(message.grammar)
            case ForgetGrammar():
                self.grammars.forget(message.key)
            case StorePages():
                self._tiers.store(message)
            case LoadPages():
                self._tiers.load(message)
            case LoadAdapter() | ForgetAdapter() | EvictAdapter():
                self.adapters.handle(message)
            case ResetWorker():
                self.runner.table.release_all()
                self.adapters.forget_all()

    def _take_adapters(self, plan: StepPlan) -> None:
        """Put the adapters of a plan's new slots into the engine."""
        places = {new.adapter for new in plan.new} - {NO_ADAPTER} if plan.new else None
        if places:
            self.adapters.take(places)

    @property
    def _tiers(self) -> PageMover:
        assert self.mover is not None, "pages are moved only where a worker has said that it can"
        return self.mover


def _then(wait: Wait, after: Callable[[], None]) -> Wait:
    """Return a function that waits for a step and calls `after` before its result is sent."""

    def finish() -> ResultMessage:
        result = wait()
        after()
        return result

    return finish
