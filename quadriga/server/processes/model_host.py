"""Loads, suspends and unloads the models of a server, as requests and the memory budget ask for it.

A model is unloaded by the end of its workers alone: its frontend goes on to take requests, and its
scheduler keeps them. The scheduler first lets the steps in flight end, so that the requests go on
where they were when the model is loaded again.
"""

import math
import time
from collections.abc import Callable, Sequence
from functools import partial

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
GIB = 1 << 30
# Between two measurements of a model's memory, which take the kernel some ms for each GiB.
MEASURE_INTERVAL_S = 1.0
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
        ConfigError: a model does not fit beside what is never unloaded, or the models that are to
            be loaded do not fit together.
    """
    if budget is None:
        return [
            plan._replace(preload=want is not False)
            for plan, want in zip(plans, wanted, strict=True)
        ]
    for plan in plans:
        pinned = [other for other in plans if other.is_pinned and other is not plan]
        if plan.num_bytes + sum(other.num_bytes for other in pinned) > budget:
            names = [other.shown_name for other in pinned]
            beside = f" beside {', '.join(names)}, never unloaded," if pinned else ""
            raise ConfigError(
                f"--model-memory is {budget / GIB:.2f} GiB, and {plan.shown_name}"
                f" needs about {plan.num_bytes / GIB:.2f}{beside}: raise it, or bound the model's"
                " KV pool with --max-total-tokens or --mem-fraction-static"
            )
    used = sum(plan.num_bytes for plan, want in zip(plans, wanted, strict=True) if want)
    if used > budget:
        names = [plan.shown_name for plan, want in zip(plans, wanted, strict=True) if want]
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

    The states of the processes are looked at again before each decision, so that it does not matter
    in which order they die, are restarted and answer.

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
        # By model that is unloaded: the schedulers that may have steps in flight.
        self._pausing: dict[str, set[str]] = {}
        # Models whose frontends report their open requests; that of others depends on nothing.
        self._followed: set[str] = set()
        self._known: set[str] = set()
        # By model that is asked for its open requests, as a report may be a second old: what is to
        # be done then.
        self._once_known: dict[str, list[Callable[[], None]]] = {}
        self._measured_at = -MEASURE_INTERVAL_S
        # None: the server starts, which has a bound of its own, and lines of its own.
        self._load_timeout_s: float | None = None

    def begin_to_serve(self, load_timeout_s: float) -> None:
        """Bound each load from now on, and log it.

        Args:
            load_timeout_s: seconds after which a load has failed.
        """
        self._load_timeout_s = load_timeout_s

    # --- what happens -----------------------------------------------------------------------------

    def on_open(self, name: str, num_open: int) -> None:
        """Take in the number of a model's open requests."""
        if name not in self._models:
            return
        use = self._turns.models[name]
        becomes_idle = use.num_open and not num_open
        self._turns.on_open(name, num_open, self._clock())
        if becomes_idle and use.idle_s < math.inf:
            self._notify(self.states)
        self._known.add(name)
        for act in self._once_known.pop(name, ()):
            act()

    def on_frontend_ready(self, name: str) -> None:
        """Take in that a frontend is ready, perhaps a new one that reports nothing yet."""
        if name in self._followed and name in self._models:
            self._models[name].frontend.send(Command.REPORT_LOAD)

    def on_ready(self, name: str) -> None:
        """Take in that a process of a model is ready, perhaps a new scheduler, to be paused too."""
        if name in self._models and self._state(name) is ModelState.UNLOADING:
            self._pause(self._models[name])

    def on_paused(self, name: str, scheduler: str, num_tokens: int) -> None:
        """Take in that a scheduler has no step in flight, and sends none.

        Args:
            name: the model.
            scheduler: name of the process.
            num_tokens: number of tokens that its worker gave.
        """
        if name in self._models:
            self._pausing.get(name, set()).discard(scheduler)
            self._turns.on_turn_over(name, num_tokens)

    def on_load_failed(self, name: str, reason: str) -> bool:
        """End the requests of a model whose worker could not start.

        Returns:
            False if it was not being loaded for requests: then this is the death of a worker.
        """
        if name not in self._models or self._state(name) is not ModelState.LOADING:
            return False
        model = self._models[name]
        model.end_workers()
        self._change(name, ModelState.FAILED)
        error = f"model {model.plan.shown_name} could not be loaded: {reason}"
        say(
            f"error: {error}. Its requests end with this error; it is tried again in"
            f" {FAILED_FOR_S:g} s at the earliest",
            event="model_failed", model=model.plan.shown_name, reason=reason,
        )  # fmt: skip
        for scheduler in model.schedulers:
            scheduler.send(Command.FAIL_ALL, error)
        return True

    def is_unloading(self, name: str) -> bool:
        """Return whether the workers of a model are about to be ended, so that each may die."""
        return name in self._models and self._state(name) is ModelState.UNLOADING

    def forget(self, name: str) -> None:
        """Leave a model alone, whose processes have ended for good."""
        self._models.pop(name, None)
        self._pausing.pop(name, None)
        self._once_known.pop(name, None)
        self._known.discard(name)
        self._turns.forget(name)

    def begin_drain(self) -> None:
        """Load models for open requests alone from now on: the server stops."""
        self._turns.want_none(self._clock())

    @property
    def is_loading(self) -> bool:
        """Whether a model is being loaded."""
        return any(use.state is ModelState.LOADING for use in self._turns.models.values())

    @property
    def has_wanted(self) -> bool:
        """Whether a model is to be loaded without a request, and is not yet."""
        return any(use.is_wanted for use in self._turns.models.values())

    # --- what is asked for ------------------------------------------------------------------------

    def follow(self, name: str) -> None:
        """Let a model be loaded and unloaded by its open requests from now on."""
        if name not in self._followed:
            self._followed.add(name)
            if self._models[name].frontend.is_ready:
                self.on_frontend_ready(name)

    def _with_load(self, name: str, act: Callable[[], None]) -> None:
        """Ask for the number of a model's open requests, and do something once it is known."""
        self._once_known.setdefault(name, []).append(act)
        self._followed.add(name)
        if self._models[name].frontend.is_ready:
            self.on_frontend_ready(name)

    def load(self, name: str) -> None:
        """Load a model as soon as there is room."""
        if name in self._models:
            self._turns.want(name, self._clock())

    def keep(self, name: str, seconds: float) -> None:
        """Unload a model after so many seconds without a request; infinite: never."""
        if name in self._known:
            self._keep(name, seconds)
        elif self._can_unload(name):
            self._with_load(name, partial(self._keep, name, seconds))

    def _keep(self, name: str, seconds: float) -> None:
        self._turns.keep(name, seconds, self._clock())
        self._notify(self.states)

    def unload(self, name: str) -> None:
        """Unload a model, unless it is busy, not loaded, or on the machines of a cluster."""
        if self._can_unload(name):
            self._with_load(name, partial(self._unload_idle, name))

    def _can_unload(self, name: str) -> bool:
        return name in self._models and not self._models[name].plan.config.replicas.in_cluster

    def _unload_idle(self, name: str) -> None:
        use = self._turns.models[name]
        if use.state is ModelState.LOADED and not use.num_open:
            self._unload(name)

    # --- what is done -----------------------------------------------------------------------------

    def act(self) -> None:
        """Take in how far loads and unloads are, then load and unload what is due."""
        now = self._clock()
        for model in self._models.values():
            self._look_at(model, now)
        self._turns.retry_failed(now)
        if self._turns.is_short_of_memory and now >= self._measured_at + MEASURE_INTERVAL_S:
            self._measured_at = now
            for name, use in self._turns.models.items():
                if use.state is ModelState.LOADED:
                    self._measure(name)
        if (unused := self._turns.to_unload(now)) is not None:
            self._unload(unused)
        while (wanted := self._turns.to_load()) is not None:
            self._change(wanted, ModelState.LOADING)
            if self._load_timeout_s is not None:
                num_open = self._turns.models[wanted].num_open
                shown = self._models[wanted].plan.shown_name
                say(
                    f"model {shown} is being loaded for {num_open} open requests",
                    event="model_loading", model=shown, open=num_open,
                )  # fmt: skip
            self._models[wanted].start_workers()

    def _look_at(self, model: ModelProcesses, now: float) -> None:
        """Take in how far the load or the unload of a model is."""
        name = model.plan.name
        match self._state(name):
            case ModelState.LOADING:
                if model.is_loaded:
                    self._measure(name)
                    self._change(name, ModelState.LOADED)
                    self._log_load(name)
                elif (ends_at := self._load_ends_at(name)) is not None and now >= ends_at:
                    reason = f"not ready within {self._load_timeout_s:g} s; raise --start-timeout"
                    self.on_load_failed(name, reason)
            case ModelState.UNLOADING:
                # A worker that is not ready has no step that could still end.
                steps = {one.scheduler.name for one in model.rings if one.worker.is_ready}
                if not steps & self._pausing[name]:
                    self._end_workers(model)

    def _log_load(self, name: str) -> None:
        if self._load_timeout_s is not None:
            seconds, shown = self._turns.models[name].load_s, self._models[name].plan.shown_name
            say(
                f"model {shown} is loaded after {seconds:.1f} s",
                event="model_loaded", model=shown, seconds=round(seconds, 3),
            )  # fmt: skip

    def _load_ends_at(self, name: str) -> float | None:
        """Return when a load has failed."""
        if self._load_timeout_s is None or self._state(name) is not ModelState.LOADING:
            return None
        return self._turns.models[name].changed_at + self._load_timeout_s

    def seconds_to_next(self) -> float | None:
        """Return the seconds until time alone may give something to do; None: never."""
        times = [self._turns.next_at(), *map(self._load_ends_at, self._models)]
        at = min((time for time in times if time is not None), default=None)
        return None if at is None else max(0.0, at - self._clock())

    def _unload(self, name: str) -> None:
        use, model = self._turns.models[name], self._models[name]
        verb = f"suspended with {use.num_open} open requests" if use.num_open else "unloaded"
        shown = model.plan.shown_name
        say(f"model {shown} is {verb}", event="model_unloading", model=shown, open=use.num_open)
        self._change(name, ModelState.UNLOADING)
        self._pause(model)

    def _pause(self, model: ModelProcesses) -> None:
        self._pausing[model.plan.name] = {scheduler.name for scheduler in model.schedulers}
        for scheduler in model.schedulers:
            scheduler.send(Command.PAUSE, str(time.monotonic_ns()))

    def _end_workers(self, model: ModelProcesses) -> None:
        self._pausing.pop(model.plan.name, None)
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
