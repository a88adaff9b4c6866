"""Loads, suspends and unloads the models of a server, as requests and the memory budget ask for it.

A model is unloaded by the end of its workers alone: its frontend goes on to take requests, and its
scheduler keeps them. The scheduler first lets the steps in flight end, so that the requests go on
where they were when the model is loaded again.
"""

import math
import time
from collections.abc import Callable, Sequence

import msgspec
import psutil

from quadriga.errors import ConfigError
from quadriga.server.config.engine_args import OTHER_FRACTION, WorkerArgs
from quadriga.server.model_list import ModelLoad
from quadriga.server.processes.control_channel import Command
from quadriga.server.processes.logs import say
from quadriga.server.processes.machine import runs_on_gpu
from quadriga.server.processes.model_processes import ModelPlan, ModelProcesses
from quadriga.server.processes.model_turns import FAILED_FOR_S, ModelState, ModelTurns

MEGABYTE = 1_000_000
# A scheduler answers within a step; one that does not answer for so long is not waited for.
PAUSE_TIMEOUT_S = 30.0


GIB = 1 << 30
# Of a worker beside its weights and its KV pool.
PROCESS_BYTES = 200 * MEGABYTE


def expected_bytes(args: WorkerArgs, num_weight_bytes: int) -> int:
    """Return about how much memory the worker of a model needs, before it was ever loaded.

    Args:
        args: the share of the free memory for the KV pool.
        num_weight_bytes: size of the files of its weights.
    """
    pool = 0
    if not runs_on_gpu(args):
        fraction = args.mem_fraction_static or OTHER_FRACTION
        pool = int(fraction * psutil.virtual_memory().available)
    return num_weight_bytes + pool + PROCESS_BYTES


def with_preloads(
    plans: Sequence[ModelPlan], wanted: Sequence[bool | None], budget: int | None
) -> list[ModelPlan]:
    """Decide which models are loaded at the start: those for which there is room, in order.

    Args:
        plans: the models.
        wanted: whether each is to be loaded; None: if there is room.
        budget: as of ModelTurns.

    Raises:
        ConfigError: a model does not fit, or those that are to be loaded do not fit together.
    """
    if budget is None:
        return [
            plan._replace(preload=want is not False)
            for plan, want in zip(plans, wanted, strict=True)
        ]
    for plan in plans:
        if plan.num_bytes > budget:
            raise ConfigError(
                f"--model-memory is {budget / GIB:.2f} GiB, and {plan.config.model.shown_name}"
                f" needs about {plan.num_bytes / GIB:.2f}: raise it, or bound the model's KV pool"
                " with --max-total-tokens or --mem-fraction-static"
            )
    used = sum(plan.num_bytes for plan, want in zip(plans, wanted, strict=True) if want)
    if used > budget:
        names = [
            plan.config.model.shown_name for plan, want in zip(plans, wanted, strict=True) if want
        ]
        raise ConfigError(
            f"--model-memory is {budget / GIB:.2f} GiB, and the models that are preloaded need"
            f" about {used / GIB:.2f}: {', '.join(names)}; preload fewer of them"
        )
    decided = []
    for plan, want in zip(plans, wanted, strict=True):
        fits = want is None and used + plan.num_bytes <= budget
        used += plan.num_bytes if fits else 0
        decided.append(plan._replace(preload=bool(want) or fits))
    return decided


class ModelHost:
    """Carries out what ModelTurns decides.

    Args:
        models: the processes of each model.
        turns: decides; its models are called as those of `models`.
        notify: called with the states of all models, as JSON, when one has changed.
        clock: seconds of a steady clock.
    """

    def __init__(
        self,
        models: Sequence[ModelProcesses],
        turns: ModelTurns,
        notify: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._models = {model.plan.name: model for model in models}
        self._turns = turns
        self._notify = notify
        self._clock = clock
        self._pausing: set[str] = set()  # schedulers of the model that is unloaded

    # --- what happens -----------------------------------------------------------------------------

    def on_open(self, name: str, num_open: int) -> None:
        """Take in the number of a model's open requests."""
        use = self._turns.models[name]
        becomes_idle = use.num_open and not num_open
        self._turns.on_open(name, num_open, self._clock())
        if becomes_idle and use.idle_s < math.inf:
            self._notify(self.states)

    def on_ready(self, name: str) -> None:
        """Take in that a process of a model is ready: a worker, or a scheduler."""
        model = self._models[name]
        state = self._state(name)
        if state is ModelState.LOADING and all(worker.is_ready for worker in model.workers):
            self._measure(name)
            self._change(name, ModelState.LOADED)
        elif state is ModelState.UNLOADING:  # a scheduler was restarted meanwhile
            self._pause(model)

    def on_paused(self, name: str, scheduler: str) -> None:
        """Take in that a scheduler has no step in flight, and sends none."""
        self._pausing.discard(scheduler)
        if self._state(name) is ModelState.UNLOADING and not self._pausing:
            self._end_workers(self._models[name])

    def on_load_failed(self, name: str, reason: str) -> bool:
        """End the requests of a model whose worker could not start.

        Returns:
            False if it was not being loaded for requests: then this is the death of a worker.
        """
        if self._state(name) is not ModelState.LOADING:
            return False
        model = self._models[name]
        model.end_workers()
        self._change(name, ModelState.FAILED)
        say(
            f"error: model {name} could not be loaded: {reason}. Its requests end with this error;"
            f" it is tried again in {FAILED_FOR_S:g} s at the earliest",
            event="model_failed", model=name, reason=reason,
        )  # fmt: skip
        for scheduler in model.schedulers:
            scheduler.send(Command.FAIL_ALL, f"model {name} could not be loaded: {reason}")
        return True

    def on_worker_death(self, name: str) -> bool:
        """End the other workers of a model that is unloaded; return False if it is not."""
        if self._state(name) is not ModelState.UNLOADING:
            return False
        self._end_workers(self._models[name])
        return True

    @property
    def has_wanted(self) -> bool:
        """Whether a model is to be loaded without a request, and is not yet."""
        return any(use.is_wanted for use in self._turns.models.values())

    # --- what is asked for ------------------------------------------------------------------------

    def load(self, name: str) -> None:
        """Load a model as soon as there is room."""
        self._turns.want(name, self._clock())

    def keep(self, name: str, seconds: float) -> None:
        """Unload a model after so many seconds without a request; infinite: never."""
        self._turns.keep(name, seconds, self._clock())
        self._notify(self.states)

    def unload(self, name: str) -> None:
        """Unload a model, unless it is busy or not loaded."""
        use = self._turns.models[name]
        if use.state is ModelState.LOADED and not use.num_open:
            self._unload(name)

    # --- what is done -----------------------------------------------------------------------------

    def act(self) -> None:
        """Load and unload what is due."""
        now = self._clock()
        self._turns.retry_failed(now)
        if self._turns.is_short_of_memory:
            for name, use in self._turns.models.items():
                if use.state is ModelState.LOADED:
                    self._measure(name)
        if (unused := self._turns.to_unload(now)) is not None:
            self._unload(unused)
        while (wanted := self._turns.to_load()) is not None:
            self._change(wanted, ModelState.LOADING)
            self._models[wanted].start_workers()

    def seconds_to_next(self) -> float | None:
        """Return the seconds until time alone may give something to do; None: never."""
        at = self._turns.next_at()
        return None if at is None else max(0.0, at - self._clock())

    def _unload(self, name: str) -> None:
        use, model = self._turns.models[name], self._models[name]
        verb = f"suspended with {use.num_open} open requests" if use.num_open else "unloaded"
        say(f"model {name} is {verb}", event="model_unloading", model=name, open=use.num_open)
        self._change(name, ModelState.UNLOADING)
        self._pause(model)

    def _pause(self, model: ModelProcesses) -> None:
        self._pausing = {scheduler.name for scheduler in model.schedulers}
        for scheduler in model.schedulers:
            scheduler.send(Command.PAUSE)

    def _end_workers(self, model: ModelProcesses) -> None:
        model.end_workers()
        self._change(model.plan.name, ModelState.UNLOADED)

    def _state(self, name: str) -> ModelState:
        return self._turns.models[name].state

    def _change(self, name: str, state: ModelState) -> None:
        self._turns.on_state(name, state, self._clock())
        self._notify(self.states)

    @property
    def states(self) -> str:
        """The ModelLoad of each model, as JSON."""
        loads = {
            name: ModelLoad(
                use.state.value,
                use.num_bytes,
                None if math.isinf(use.idle_s) else use.idle_s,
                use.used_at,
                use.num_loads,
                use.num_unloads,
            )
            for name, use in self._turns.models.items()
        }
        return msgspec.json.encode(loads).decode()

    def _measure(self, name: str) -> None:
        """Measure the memory of a loaded model."""
        total = 0
        for worker in self._models[name].workers:
            total += int(worker.info.get("device_bytes", 0))
            try:
                total += psutil.Process(worker.process.pid).memory_full_info().pss
            except (psutil.Error, AttributeError):  # it has died, or the system has no such value
                return
        self._turns.models[name].num_bytes = total
