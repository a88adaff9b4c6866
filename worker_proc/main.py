"""The worker: receives plans, runs them, and sends the results."""

import os
import time
from typing import TYPE_CHECKING

import msgspec

from quadriga.server.models.model_impl import choose_model_impl
from quadriga.server.models.resolve import resolve_model
from quadriga.server.processes.child import Child, run_child
from quadriga.server.processes.control_channel import EXIT_START_FAILED
from quadriga.server.processes.logs import log_exception
from quadriga.server.processes.machine import format_cpus, use_one_heap
from quadriga.wire.sockets import Inbox, Outbox
from quadriga.wire.worker import (
    ResetWorker,
    StopWorker,
    WorkerMessage,
    WorkerReady,
)
from worker_proc.distributed.leader import TPLeader
from worker_proc.distributed.rendezvous import Rendezvous
from worker_proc.result_sender import AsyncResultSender, ResultSender
from worker_proc.sampling.grammar_compiler import GrammarCompiler
from worker_proc.startup.torch_import import import_torch

if TYPE_CHECKING:
    from worker_proc.kv_tiers.page_mover import PageMover
    from worker_proc.step.runner import Runner

# How often an OpenMP thread on a CPU polls for its team before it sleeps. libgomp's own 300,000 let
# a decode step on two cores take 1 s instead of 20 ms when another process keeps one of them busy,
# as a polling thread keeps the one that it waits for from running; with 3000 it takes 60 ms then,
# and 3 % longer on an idle machine.
SPIN_COUNT = 3000


def main() -> None:
    """Run the worker until it is stopped."""
    set_up()
    run_child("worker_proc", body)


def set_up() -> None:
    """Make the settings of this process that have to come before torch is imported."""
    use_one_heap()
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", str(SPIN_COUNT))  # read when torch is imported


def body(child: Child) -> None:
    """Start, then handle messages."""
    started_at = time.monotonic_ns()
    # Bound before the model loads.
    inbox = Inbox[WorkerMessage](child.endpoints.worker, WorkerMessage)
    results = Outbox(child.endpoints.results)
    leader = _start_ranks(child)
    runner, mover, ready = start(child, None if leader is None else leader.meeting, started_at)
    results.send(ready)
    grammars = GrammarCompiler(resolve_model(child.config.model), child.endpoints.results)
    runner.table.sampling.compiled = grammars.compiled
    sender = _result_sender(child, runner, results)
    from torch import inference_mode  # loaded by now

    from worker_proc.rank import Rank, is_stale
    from worker_proc.startup.adapters import make_loader

    rank = Rank(
        runner,
        grammars,
        lambda grammar: grammars.compile(grammar, ready.session),
        make_loader(child, resolve_model(child.config.model), runner, answers=True),
        sender.send,
        mover,
    )
    receive, handle = inbox.receive, rank.handle
    with inference_mode():
        while not isinstance(message := receive(), StopWorker):
            if is_stale(message, ready.session):
                continue
            if leader is not None:
                leader.relay(message)
            handle(message)
            if isinstance(message, ResetWorker):
                ready = new_ready = _begin_session(ready, mover)
                sender.send(lambda new_ready=new_ready: new_ready)  # type: ignore[misc]
    sender.close()
    if mover is not None:
        mover.close()
    if leader is not None:
        leader.relay(message)
        leader.close()


def _start_ranks(child: Child) -> TPLeader | None:
    """Start the other ranks, if there are any. Raises ConfigError if there cannot be."""
    if child.config.worker.tp == 1:
        return None
    from worker_proc.startup.build import check_ranks

    check_ranks(child.config.worker, resolve_model(child.config.model), child.replica)
    return TPLeader(child, lambda how: _die(child, how))


def _die(child: Child, message: str) -> None:
    """End this process from any thread."""
    child.control.report("fatal", message=message)
    os._exit(EXIT_START_FAILED)


def _result_sender(child: Child, runner: "Runner", outbox: Outbox) -> ResultSender:
    if runner.table.device.type != "cuda":
        return ResultSender(outbox.send)

    def fail(error: BaseException) -> None:
        log_exception()
        _die(child, f"{type(error).__name__}: {error}")

    # A thread begins on GPU 0, where the driver would make a context of some hundred MB.
    from torch.cuda import set_device

    device = runner.table.device
    return AsyncResultSender(outbox.send, fail, lambda: set_device(device))


def new_session() -> int:
    """Return a number that no other worker of this server has."""
    return time.monotonic_ns()


def _begin_session(ready: WorkerReady, mover: "PageMover | None") -> WorkerReady:
    """Return the message for a scheduler that knows nothing of this worker."""
    session = new_session()
    stored = None if mover is None else mover.begin_session(session)
    return msgspec.structs.replace(ready, session=session, stored=stored)


def start(
    child: Child, meeting: Rendezvous | None, started_at: int
) -> "tuple[Runner, PageMover | None, WorkerReady]":
    """Load the model, warm up, and report to the launcher that this process is ready.

    Args:
        child: this process.
        meeting: how the ranks find each other; None for a single rank.
        started_at: as in WorkerReady.

    Returns:
        The runner, what moves pages to and from the tiers, and the message for the scheduler.
    """
    clock = _PhaseClock(child)
    clock.begin("import torch")
    files = resolve_model(child.config.model)
    import_torch(child.config.worker, choose_model_impl(files))
    from worker_proc.kv_tiers.exchange import PageExchange
    from worker_proc.kv_tiers.opening import open_tiers
    from worker_proc.loading.sharding import TPRank
    from worker_proc.startup.adapters import check_modules
    from worker_proc.startup.build import describe_kernels, make_runner
    from worker_proc.startup.devices import take_cores
    from worker_proc.startup.drafts import prepare_drafts
    from worker_proc.startup.memory_profile import FirstStart
    from worker_proc.startup.prefill_tuning import tune_prefill_size

    cores = take_cores(child.config.worker, child.replica)
    part = TPRank(0, child.config.worker.tp)
    run_dir = child.endpoints.run_dir
    runner = make_runner(
        child.config, files, part, meeting, clock.begin, child.replica, run_dir,
        keeps_packed=bool(child.of_model),
    )  # fmt: skip
    if child.config.worker.has_offload or child.config.replicas.has_roles:
        clock.begin("open the KV tiers")
    # Without a prefix cache no page has a name.
    suspension_dir = "" if child.config.scheduler.disable_radix_cache else child.suspension_dir
    exchange = PageExchange.of(child)
    mover = open_tiers(
        child.config.worker, files, runner, child.replica, child.endpoints.results, suspension_dir,
        exchange,
    )  # fmt: skip
    if child.config.model.lora_modules and not child.is_restart:
        clock.begin("check adapters")
        check_modules(child, files, runner)
    clock.begin("warm up")
    runner.warm_up()
    clock.begin("find the size of a prefill")
    record = FirstStart.path(run_dir, part.rank)
    first = FirstStart.read(record)
    prefill_tokens = 0 if first is None else first.prefill_tokens
    if child.config.scheduler.measures_chunks and not prefill_tokens:
        prefill_tokens = tune_prefill_size(runner, part.count)
        if first is not None:
            msgspec.structs.replace(first, prefill_tokens=prefill_tokens).write(record)
    if child.config.scheduler.speculative_method == "self":
        clock.begin("measure drafts")
    draft_costs = prepare_drafts(runner, child.config, part.count)
    clock.end()
    table = runner.table
    ready = WorkerReady(
        num_pages=table.num_pages,
        page_size=table.page_size,
        num_slots=table.num_slots,
        dtype=str(runner.dtype).removeprefix("torch."),
        device=str(table.device),
        pid=os.getpid(),
        backend=runner.engine.name,
        prefill_tokens=prefill_tokens,
        window=runner.window,
        can_guess=draft_costs is not None,
        kernels=describe_kernels(child.config.worker, runner),
        cuda_graph=runner.engine.has_graphs,
        draft_costs=draft_costs or [],
        is_encoder=not runner.engine.has_head,
        started_at=started_at,
        fetches=mover is not None and mover.fetches,
        page_bytes=0 if mover is None else mover.page_bytes,
    )
    ready = _begin_session(ready, mover)
    child.ready(
        dtype=ready.dtype,
        device=ready.device,
        tokens=table.num_pages * table.page_size,
        threads=cores.threads,
        cpus=format_cpus(cores.worker),
        backend=ready.backend,
    )
    runner.engine.prefault_pages(cores.others)
    return runner, mover, ready


class _PhaseClock:
    """Reports the begin and the duration of each phase of the start."""

    def __init__(self, child: Child) -> None:
        self._child = child
        self._phase = ""
        self._phase_began_at = 0.0

    def begin(self, phase: str) -> None:
        """Report the begin of a phase, and the duration of the one before."""
        self.end()
        self._child.begin_phase(phase)
        self._phase, self._phase_began_at = phase, time.perf_counter()

    def end(self) -> None:
        """Report the duration of the phase that is under way."""
        if self._phase:
            self._child.phase(self._phase, time.perf_counter() - self._phase_began_at)
        self._phase = ""
