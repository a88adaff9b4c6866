"""The worker: receive a plan, run it, send what came out."""

import os
import time
from typing import TYPE_CHECKING

from quadriga.messages.worker import (
    CompileGrammar,
    ForgetGrammar,
    ResultMessage,
    StepPlan,
    StopWorker,
    WorkerMessage,
    WorkerReady,
)
from quadriga.model_source import resolve_model
from quadriga.process import Child, run_child
from quadriga.sockets import Inbox, Outbox
from worker_proc.grammar_compiler import GrammarCompiler

if TYPE_CHECKING:
    from worker_proc.runner import Runner

SPIN_COUNT = 3000
"""How often a torch thread on a CPU looks whether its team goes on before it sleeps.

libgomp's own 300,000 let a decode step on two cores take 1 s instead of 20 ms when another process
keeps one of them busy, for a thread that looks keeps the one it waits for from running; with 3000
it takes 60 ms then, and 3 % longer on an idle machine.
"""


def main() -> None:
    run_child("worker_proc", body)


def body(child: Child) -> None:
    """Bind first, so that nobody waits for a socket while the model loads."""
    inbox: Inbox[WorkerMessage] = Inbox(child.endpoints.worker, WorkerMessage)
    results = Outbox(child.endpoints.results)
    runner = start(child, results)
    grammars = GrammarCompiler(resolve_model(child.config.model), child.endpoints.results)
    runner.table.sampling.compiled = grammars.compiled
    receive, run, send = inbox.receive, runner.run, results.send
    while not isinstance(message := receive(), StopWorker):
        match message:
            case StepPlan():
                send(run(message))
            case CompileGrammar():
                grammars.compile(message.grammar)
            case ForgetGrammar():
                grammars.forget(message.key)


def start(child: Child, results: Outbox) -> "Runner":
    """Load and warm up; tell the scheduler what the pool came out as, and the launcher that this
    process is ready."""
    clock = _PhaseClock(child)
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", str(SPIN_COUNT))  # read when torch is imported
    from worker_proc.hardware import set_threads
    from worker_proc.runner import make_runner

    threads = set_threads(child.config.worker)
    clock.end_of("import torch")
    runner = make_runner(child.config, resolve_model(child.config.model))
    clock.end_of("load weights")
    runner.warm_up()
    clock.end_of("warm up")
    table, dtype = runner.table, str(runner.dtype).removeprefix("torch.")
    device = str(table.device)
    backend = runner.engine.name
    ready: ResultMessage = WorkerReady(
        table.num_pages, table.page_size, table.num_slots, dtype, device, os.getpid(), backend
    )
    results.send(ready)
    tokens = table.num_pages * table.page_size
    child.ready(dtype=dtype, device=device, tokens=tokens, threads=threads, backend=backend)
    return runner


class _PhaseClock:
    """Reports how long each phase of the start took."""

    def __init__(self, child: Child) -> None:
        self._child = child
        self._since = time.perf_counter()

    def end_of(self, what: str) -> None:
        now = time.perf_counter()
        self._child.phase(what, now - self._since)
        self._since = now
