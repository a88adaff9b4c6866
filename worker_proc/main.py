"""The worker: receive a plan, run it, send what came out."""

import os
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from quadriga.model_files.resolve import resolve_model
from quadriga.runtime.child import EXIT_START_FAILED, Child, run_child
from quadriga.runtime.cpu_affinity import format_cpus, runs_on_gpu
from quadriga.runtime.fault_injection import faulty_inbox
from quadriga.runtime.malloc import use_one_heap
from quadriga.wire.messages.worker import (
    CompileGrammar,
    ForgetGrammar,
    ResetWorker,
    StepPlan,
    StopWorker,
    WorkerMessage,
    WorkerReady,
)
from quadriga.wire.sockets import Inbox, Outbox
from worker_proc.distributed.tp_leader import TPLeader
from worker_proc.result_sender import AsyncResultSender, ResultSender, SyncResultSender
from worker_proc.sampling.grammar_compiler import GrammarCompiler
from worker_proc.system.prefault import memory_meanwhile

if TYPE_CHECKING:
    from worker_proc.runner import Runner

SPIN_COUNT = 3000
"""How often a torch thread on a CPU looks whether its team goes on before it sleeps.

libgomp's own 300,000 let a decode step on two cores take 1 s instead of 20 ms when another process
keeps one of them busy, for a thread that looks keeps the one it waits for from running; with 3000
it takes 60 ms then, and 3 % longer on an idle machine.
"""


def main() -> None:
    use_one_heap()
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", str(SPIN_COUNT))  # read when torch is imported
    run_child("worker_proc", body)


def body(child: Child) -> None:
    """Bind first, so that nobody waits for a socket while the model loads."""
    inbox = faulty_inbox(
        Inbox[WorkerMessage](child.endpoints.worker, WorkerMessage),
        "worker",
        child.config.launch.fault,
    )
    results = Outbox(child.endpoints.results)
    followers = _followers(child)
    runner, ready = start(child, None if followers is None else followers.store)
    results.send(ready)
    grammars = GrammarCompiler(resolve_model(child.config.model), child.endpoints.results)
    runner.table.sampling.compiled = grammars.compiled
    in_turn = _in_turn(child, runner, results)
    receive, launch, send = inbox.receive, runner.launch, in_turn.send
    from torch import inference_mode  # loaded by now

    with inference_mode():
        while not isinstance(message := receive(), StopWorker):
            if isinstance(message, StepPlan) and message.session != ready.session:
                continue
            if followers is not None:
                followers.relay(message)
            match message:
                case StepPlan():
                    send(launch(message))
                case CompileGrammar():
                    grammars.compile(message.grammar, ready.session)
                case ForgetGrammar():
                    grammars.forget(message.key)
                case ResetWorker():
                    runner.table.release_all()
                    ready = again = msgspec.structs.replace(ready, session=new_session())
                    send(lambda again=again: again)  # type: ignore[misc]
    in_turn.close()
    if followers is not None:
        followers.relay(message)
        followers.close()


def _followers(child: Child) -> TPLeader | None:
    """None where the worker is one process. ConfigError where it cannot be more."""
    if child.config.worker.tp == 1:
        return None
    from worker_proc.distributed.tp_group import check_ranks

    check_ranks(child.config.worker, resolve_model(child.config.model))
    return TPLeader(child, lambda how: _die(child, how))


def _die(child: Child, message: str) -> None:
    """From any thread."""
    child.control.report("fatal", message=message)
    os._exit(EXIT_START_FAILED)


def _in_turn(child: Child, runner: "Runner", outbox: Outbox) -> ResultSender:
    """On a card steps are launched ahead, and a thread waits for what comes out of them."""
    if runner.table.device.type != "cuda":
        return SyncResultSender(outbox.send)

    def fail(error: Exception) -> None:
        traceback.print_exc()
        _die(child, f"{type(error).__name__}: {error}")

    return AsyncResultSender(outbox.send, fail)


def new_session() -> int:
    """A number that no other worker of this server has."""
    return time.monotonic_ns()


def start(child: Child, store: Path | None) -> "tuple[Runner, WorkerReady]":
    """Load and warm up; tell the launcher that this process is ready. What the pool came out as.

    store: where all ranks find each other, None where there is one.
    """
    clock = _PhaseClock(child)
    files = resolve_model(child.config.model)
    with memory_meanwhile(0 if runs_on_gpu(child.config.worker) else files.weights_bytes):
        from worker_proc.loading.sharding import TPRank
        from worker_proc.runner import make_runner
        from worker_proc.startup.prefill_tuning import tune_prefill_size
        from worker_proc.system.devices import take_cores

    cores = take_cores(child.config.worker)
    clock.end_of("import torch")
    part = TPRank(0, child.config.worker.tp)
    runner = make_runner(child.config, files, part, store)
    clock.end_of("load weights")
    runner.warm_up()
    clock.end_of("warm up")
    prefill_tokens = (
        tune_prefill_size(runner, part.count) if child.config.scheduler.measures_chunks else 0
    )
    clock.end_of("find the size of a prefill")
    table, dtype = runner.table, str(runner.dtype).removeprefix("torch.")
    device = str(table.device)
    backend = runner.engine.name
    ready = WorkerReady(
        table.num_pages,
        table.page_size,
        table.num_slots,
        dtype,
        device,
        os.getpid(),
        backend,
        prefill_tokens,
        new_session(),
    )
    tokens = table.num_pages * table.page_size
    child.ready(
        dtype=dtype,
        device=device,
        tokens=tokens,
        threads=cores.threads,
        cpus=format_cpus(cores.worker),
        backend=backend,
    )
    runner.engine.take_memory_ahead(cores.others)
    return runner, ready


class _PhaseClock:
    """Reports how long each phase of the start took."""

    def __init__(self, child: Child) -> None:
        self._child = child
        self._since = time.perf_counter()

    def end_of(self, what: str) -> None:
        now = time.perf_counter()
        self._child.phase(what, now - self._since)
        self._since = now
