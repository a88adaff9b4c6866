r"""A worker that computes nothing: each step sleeps for a fixed time, tokens come from a hash.

`install` puts it in the place of the workers of a server. Nothing else of the server is different,
so that what the other processes can deliver is measured:

    export QUADRIGA_PROCESS_HOOK=bench.paced_worker:install QUADRIGA_BENCH_STEP_MS=10
    python -m bench.compare "1: --dp 1 --max-concurrency 64 --num-requests 192" \
        "8: --dp 8 --max-concurrency 512 --num-requests 1536" -- --no-stop-on-eos \
        --speculative-method none --random-input-len 32 --max-new-tokens 256
"""

import os
import time
from collections.abc import Callable, Mapping
from functools import partial
from types import SimpleNamespace

from quadriga import clock
from quadriga.server.models.resolve import resolve_model
from quadriga.server.processes.child import Child
from quadriga.wire.worker import StepPlan, StepResult, WorkerReady
from simulator import latency, replica
from worker_proc import main as worker_main

PAGES_A_SLOT = 64
STEP_MS_VARIABLE = "QUADRIGA_BENCH_STEP_MS"


def install(name: str) -> None:
    """Change a worker's start before it begins; other processes stay as they are."""
    if name.partition("/")[0] == "worker_proc":
        step_s = float(os.environ[STEP_MS_VARIABLE]) / latency.MS
        worker_main.start = partial(start, step_s)  # type: ignore[assignment]


class PacedRunner:
    """Runs plans as worker_proc.step.runner.Runner does, without a model.

    Attributes:
        table: itself: it has the slots, too.
        sampling: itself; `compiled` is set and not read, as no load has grammars.
    """

    device = SimpleNamespace(type="cpu")

    def __init__(self, slots: replica.SimulatedSlots, step_s: float) -> None:
        self._slots = slots
        self._step_s = step_s
        self.table = self.sampling = self
        self.compiled: Mapping[bytes, object] = {}

    def launch(self, plan: StepPlan) -> Callable[[], StepResult]:
        """Run one step; a plan without rows takes no time."""
        began = clock.now()
        work = self._slots.apply(plan)
        if plan.slots:
            time.sleep(max(0.0, began + self._step_s - clock.now()))
        result = StepResult(plan.step, work.token_ids, began, clock.now(), session=plan.session)
        return lambda: result

    def release_all(self) -> None:
        """Forget nothing: the next plan of a slot says what it has."""


def start(
    step_s: float, child: Child, _: object, started_at: int
) -> tuple[PacedRunner, None, WorkerReady]:
    """Take the place of worker_proc.main.start, for steps of `step_s` seconds."""
    num_slots = child.config.scheduler.max_running_requests
    slots = replica.SimulatedSlots(num_slots, resolve_model(child.config.model).vocab_size)
    ready = WorkerReady(
        num_pages=PAGES_A_SLOT * num_slots,
        page_size=child.config.worker.page_size,
        num_slots=num_slots,
        dtype="float32",
        device="cpu",
        pid=os.getpid(),
        backend="none",
        session=worker_main.new_session(),
        started_at=started_at,
    )
    child.ready(
        dtype=ready.dtype,
        device=ready.device,
        tokens=ready.num_pages * ready.page_size,
        threads=1,
        cpus="",
        backend=ready.backend,
    )
    return PacedRunner(slots, step_s), None, ready
