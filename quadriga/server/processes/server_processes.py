"""The processes of a server: which there are, what the death of one means, and how a server stops.

After a signal open requests finish, or are aborted in the end (ServerDrain).
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from quadriga.clock import Countdown
from quadriga.server.config.server_config import LaunchArgs
from quadriga.server.model_list import write_models
from quadriga.server.processes.child_process import (
    EXIT_GRACE_S,
    ChildProcess,
    ModelWish,
    ProcessStart,
    ReplicaChange,
)
from quadriga.server.processes.control_channel import (
    EXIT_CHILD_DIED,
    EXIT_FORCED,
    EXIT_OK,
    GATEWAY_GOES_ON,
    Command,
)
from quadriga.server.processes.logs import say
from quadriga.server.processes.machine import runs_on_gpu
from quadriga.server.processes.model_host import ModelHost
from quadriga.server.processes.model_processes import ModelPlan, ModelProcesses
from quadriga.server.processes.model_turns import ModelTurns, ModelUse
from quadriga.server.processes.process_name import ProcessName
from quadriga.server.processes.replicas import FRONTEND, SCHEDULER, WORKER
from quadriga.server.processes.spare import SpareWorkers
from quadriga.server.processes.supervisor import (
    Death,
    FirstReady,
    ReadyAgain,
    Supervisor,
    SupervisorEvent,
)

GATEWAY, SPARE = "http_proc", "worker_proc.spare"
# Programs that report to the clients why the server ends.
CLIENT_FACING = (FRONTEND, GATEWAY)
# Time in which frontend and gateway report to the clients why the server ends.
NOTIFY_TIMEOUT_S = 1.5


class ServerProcesses(Supervisor):
    """Supervises the processes of one server, and keeps each frontend informed of the others.

    Args:
        plans: the models, the first of which a request gets that names none.
        gateway_flags: command line flags of the gateway; None: the server has none.
        launch: limits of restarts and of the watchdog.
        budget: bytes that the workers of loaded models may have together; None: no bound.
        program_of: returns the command that runs a process, before its flags.

    Attributes:
        models: the processes of each model.
    """

    def __init__(
        self,
        plans: Sequence[ModelPlan],
        gateway_flags: list[str] | None,
        launch: LaunchArgs,
        program_of: Callable[[str], list[str]],
        budget: int | None = None,
    ) -> None:
        self.models = [ModelProcesses(plan, number) for number, plan in enumerate(plans)]
        self._gateway_flags = gateway_flags
        no_restart = [name for model in self.models for name in model.no_restart]
        super().__init__([], program_of, launch, no_restart)
        for model in self.models:
            model.open(self)
        uses = {plan.name: _use_of(plan) for plan in plans}
        on_gpu = any(runs_on_gpu(plan.config.worker) for plan in plans)
        self._suspends = budget is not None and len(plans) > 1
        turns = ModelTurns(uses, budget, launch.model_turn, loads_at_once=not on_gpu)
        self.host = ModelHost(self.models, turns, self._notify_gateway)
        self._swapped = {
            plan.name
            for plan in plans
            if not plan.config.replicas.in_cluster
            and (self._suspends or not plan.preload or plan.idle_unload_s is not None)
        }
        self._spares = SpareWorkers(program_of(SPARE))
        self._keeps_spare = bool(self._swapped)

    def _notify_gateway(self, states: str) -> None:
        if GATEWAY in self:
            self[GATEWAY].send(Command.MODELS, states)

    @property
    def is_starting(self) -> bool:
        """Whether a process does not serve, or a model is still to be loaded."""
        return bool(self.not_ready) or self.host.has_wanted

    @property
    def not_ready(self) -> list[str]:
        """Names of the processes that do not serve, but for workers that requests load."""
        return [name for name in super().not_ready if not self._is_on_demand(name)]

    def _is_on_demand(self, name: str) -> bool:
        """Return whether a process is the worker of a model that the start does not wait for."""
        model, is_worker = self.model_of(name), ProcessName.parse(name).program == WORKER
        return model is not None and is_worker and not model.plan.preload

    @property
    def live_models(self) -> list[ModelProcesses]:
        """The models whose processes have not ended for good."""
        return [model for model in self.models if not model.lost]

    def model_of(self, name: str) -> ModelProcesses | None:
        """Return the model of a process; None for the gateway."""
        process = ProcessName.parse(name)
        if process.program == GATEWAY:
            return None
        return next(model for model in self.models if model.plan.name == process.model)

    def start_all(self) -> None:
        """Start every process."""
        if len(self.models) > 1:
            self._write_models()
        for model in self.models:
            if model.plan.preload:
                self.host.load(model.plan.name)
        self.host.act()
        for model in self.models:
            model.start()
            if model.plan.name in self._swapped:
                self.host.follow(model.plan.name)
        if self._gateway_flags is not None:
            self.start(GATEWAY)

    @property
    def _models_file(self) -> Path:
        """What each process that has clients knows of the models, where there are several."""
        return self.run_dir / "models.json"

    def _write_models(self) -> None:
        write_models(self._models_file, [model.entry(self.run_dir) for model in self.models])

    def _start_of(self, name: ProcessName) -> ProcessStart:
        program, model = self._program_of(name.program), self.model_of(str(name))
        flags = (self._gateway_flags or []) if model is None else model.plan.flags
        if name.program in CLIENT_FACING and len(self.models) > 1:
            flags = [*flags, "--models-file", str(self._models_file)]
        model_dir = self.run_dir if model is None else model.directory(self.run_dir)
        if name.program != WORKER:
            return ProcessStart(program, self.run_dir, model_dir, flags)
        if self._suspends:
            flags = [*flags, "--suspension-dir", str(model_dir / "pages")]
        return ProcessStart(program, self.run_dir, model_dir, flags, self._spares.take())

    def next_event(self, timeout: Countdown | None) -> Death | SupervisorEvent | None:
        """Wait for the next event, and pass on what the frontends and the replicas have to know.

        Args:
            timeout: as in `Supervisor.next_event`.

        Returns:
            None also after what only the frontends or the replicas have to know.
        """
        self.host.act()
        if self._keeps_spare:
            self._spares.keep(is_quiet=not (self.is_starting or self.host.is_loading))
        event = super().next_event(timeout)
        match event:
            case FirstReady():
                self._on_ready(event.name)
                return None
            case ReadyAgain():
                if (model := self.model_of(event.name)) is not None:
                    name = ProcessName.parse(event.name).in_model
                    model.replicas.on_ready_again(name, model)
                self._on_ready(event.name)
                return None
            case ModelWish():
                self._on_wish(event)
                return None
            case ReplicaChange():
                self._on_change(event)
                return None
            case Death() if self._ends_with_unload(event):
                return None
            case SupervisorEvent.RESTARTED:
                for model in self.live_models:
                    model.replicas.report_lost(model.frontend)
        return event

    def _on_ready(self, name: str) -> None:
        """Take in that a process is ready, for the first time or again."""
        model = self.model_of(name)
        if model is None:
            self._notify_gateway(self.host.states)
        else:
            self.host.on_ready(model.plan.name)
            if ProcessName.parse(name).program == FRONTEND:
                self.host.on_frontend_ready(model.plan.name)

    def _on_wish(self, wish: ModelWish) -> None:
        """Do what a client of the gateway wants of a model."""
        name = wish.name if len(self.models) > 1 else self.models[0].plan.name
        if wish.idle_s is not None:
            self.host.keep(name, wish.idle_s if wish.idle_s >= 0 else math.inf)
        if wish.loaded:
            self.host.load(name)
        elif wish.loaded is not None:
            self.host.unload(name)

    def _on_change(self, change: ReplicaChange) -> None:
        """Take in what a process of a model reports."""
        model = next(model for model in self.models if model.plan.name == change.model)
        in_cluster = model.plan.config.replicas.in_cluster
        if change.state == "load" and not in_cluster:
            self.host.on_open(change.model, int(change.argument))
        elif change.state == "paused":
            replicas = model.plan.config.replicas
            scheduler = replicas.process_name(SCHEDULER, change.replica)
            name, num_tokens = model.full_name(scheduler), int(change.argument)
            self.host.on_paused(change.model, name, num_tokens)
        else:
            model.replicas.on_report(change, model)

    def _ends_with_unload(self, death: Death) -> bool:
        """Return whether a worker has died whose model is being unloaded."""
        model = self.model_of(death.name)
        if model is None or ProcessName.parse(death.name).program != WORKER:
            return False
        return self.host.is_unloading(model.plan.name)

    def _seconds_to_wait(self, timeout: Countdown | None, now: float) -> float | None:
        own = (self.host.seconds_to_next(), self._spares.seconds_to_next())
        waits = (super()._seconds_to_wait(timeout, now), *own)
        return min((wait for wait in waits if wait is not None), default=None)

    # --- stop -------------------------------------------------------------------------------------

    def begin_drain(self) -> None:
        """Load models for open requests alone from now on: the server stops."""
        self._keeps_spare = False
        self._spares.close()
        self.host.begin_drain()

    def clean_up(self) -> None:
        """End every process that still runs, also the spare worker."""
        self._spares.close()
        super().clean_up()

    # --- reloads ----------------------------------------------------------------------------------

    @property
    def reload_note(self) -> str:
        """What a reload does."""
        return self.live_models[0].replicas.reload_note

    def begin_reload(self) -> None:
        """Restart the workers, of each model one after the other."""
        for model in self.live_models:
            model.replicas.begin_reload(model.workers)

    def reload_next(self) -> None:
        """Restart the next workers of a reload, once those before them are ready."""
        for model in self.live_models:
            model.replicas.reload_next(model)

    # --- deaths -----------------------------------------------------------------------------------

    def restart(self, death: Death) -> bool:
        """Schedule the restart of a process that died; return False if it must not be restarted."""
        if death.restart_delay_s is None:
            return False
        if death.is_reload:
            say(
                f"{death.name} is replaced for the reload; requests go on with the new weights",
                event="process_replaced", child=death.name,
            )  # fmt: skip
            self._start_again(death)
            return True
        fate = (
            "by ZeroMQ and resumable streams go on, others by HTTP are lost"
            if death.name == GATEWAY
            else "go on"
        )
        say(
            f"{death.name} died ({death.reason}) and is restarted; requests {fate}",
            event="process_died", child=death.name, reason=death.reason,
            restart_delay_s=death.restart_delay_s,
        )  # fmt: skip
        self._start_again(death)
        return True

    def _start_again(self, death: Death) -> None:
        if (model := self.model_of(death.name)) is not None:
            model.replicas.on_restart(ProcessName.parse(death.name).in_model, model)
        self.start_later(death.name, death.restart_delay_s or 0.0)

    def survives_start(self, death: Death) -> bool:
        """Go on with the start after a death; return False if the server cannot start."""
        if self.restart(death):
            return True
        name = ProcessName.parse(death.name).model
        return self._is_on_demand(death.name) and self.host.on_load_failed(name, death.reason)

    def survives(self, death: Death) -> bool:
        """Go on after a death: restart the process, or leave its replica or model to the others.

        Returns:
            False if the server ends with it.
        """
        if self.restart(death):
            return True
        model = self.model_of(death.name)
        if model is None:
            return False
        if ProcessName.parse(death.name).program == WORKER and self.host.on_load_failed(
            model.plan.name, death.reason
        ):
            return True
        in_model = dataclasses.replace(death, name=ProcessName.parse(death.name).in_model)
        return model.replicas.lose(in_model, model) or self._lose_model(model, death)

    def _lose_model(self, model: ModelProcesses, death: Death) -> bool:
        """End the processes of a model; return False if it is the last one."""
        if len(self.live_models) == 1:
            return False
        name, others = model.plan.name, len(self.live_models) - 1
        message = f"{death.name} died ({death.reason}); all open requests of {name} are lost"
        plural = "models go on" if others > 1 else "model goes on"
        say(
            f"error: {message}. {others} other {plural}; start the server again to have all",
            event="model_lost", model=name, child=death.name, reason=death.reason,
        )  # fmt: skip
        reason = f"{message}; start the server again"
        model.lose(reason, Countdown(NOTIFY_TIMEOUT_S))
        self.host.forget(name)
        if self._gateway_flags is not None:
            try:
                self._write_models()  # for a gateway that takes the place of this one
            except OSError as error:
                say(f"warning: a gateway that is restarted waits for {name}: {error}")
            self[GATEWAY].send(Command.LOST, f"{name} {reason}")
        return True

    def give_up(self, death: Death) -> None:
        """Report to the clients which process died for good: the server ends."""
        message = f"{death.name} died ({death.reason}); all open requests are lost"
        self.fail_clients(f"{message}; the server is stopping, start it again")
        say(
            f"error: {message}. Start the server again; its log above may say why.",
            event="process_died", child=death.name, reason=death.reason, restart_delay_s=None,
        )  # fmt: skip

    def fail_clients(self, message: str, programs: Iterable[str] = CLIENT_FACING) -> None:
        """Make frontends and gateway, or those of `programs`, fail open requests and exit."""
        countdown = Countdown(NOTIFY_TIMEOUT_S)
        children = [child for child in self.of_programs(programs) if not child.has_exited]
        for child in children:
            child.send(Command.FAIL, message)
        for child in children:
            if not child.exits_within(countdown):
                child.process.kill()

    def of_programs(self, programs: Iterable[str]) -> list[ChildProcess]:
        """Return the processes that run one of the programs."""
        return [child for child in self if ProcessName.parse(child.name).program in programs]


def _use_of(plan: ModelPlan) -> ModelUse:
    return ModelUse(
        plan.num_bytes,
        is_pinned=plan.is_pinned or plan.config.replicas.in_cluster,
        idle_unload_s=plan.idle_unload_s,
    )


STOPPED_AT_ONCE = "the server was stopped at once, before this request had finished"
# Time after --shutdown-timeout in which the aborted requests are answered.
ABORT_TIMEOUT_S = 5.0


class ServerDrain:
    """Drains the processes of a server, each of which exits when it has nothing left.

    Args:
        processes: the server's.
        timeout_s: seconds that open requests may go on.
        has_journal: clients of the ZeroMQ socket wait for a server that resumes their requests,
            where this one is stopped by force.
    """

    def __init__(self, processes: ServerProcesses, timeout_s: float, has_journal: bool) -> None:
        self._processes = processes
        self._timeout_s = timeout_s
        self._has_journal = has_journal
        # By model: the time from the delivery of everything on in which its processes may exit.
        self._grace: dict[str, Countdown] = {}

    def run(self) -> int:
        """Finish open requests, or abort them when their time is over; return the exit code."""
        timeout = self._timeout_s
        say(f"stopping: open requests have {timeout:g} s; a second signal ends them now")
        self._processes.cancel_start(GATEWAY)
        self._processes.begin_drain()
        self._send_drain()
        outcome = self._wait_for_exits(timeout)
        if outcome is None:
            say(f"{timeout:g} s are over: aborting the requests that are left")
            reason = "the server stopped before this request had finished"
            for model in self._processes.live_models:
                for name in (FRONTEND, *model.replicas.schedulers):
                    model[name].send(Command.ABORT, reason)
            outcome = self._wait_for_exits(ABORT_TIMEOUT_S)
        if outcome is None:
            say("error: some process did not stop in time and is killed")
            return EXIT_FORCED
        if outcome == EXIT_OK:
            say("stopped")
        return outcome

    def _send_drain(self) -> None:
        gateways = self._processes.of_programs([GATEWAY])
        drained = list(gateways)
        for model in self._processes.live_models:
            drained += model.replicas.drained(model)
        for child in drained:
            child.send(Command.DRAIN)
        goes_on = any(not child.has_exited for child in gateways)
        self._drain_frontends(GATEWAY_GOES_ON if goes_on else "")

    def _drain_frontends(self, argument: str = "") -> None:
        """Stop the requests of clients; "": of the gateway, too, which has left."""
        for frontend in self._processes.of_programs([FRONTEND]):
            frontend.send(Command.DRAIN, argument)

    def _wait_for_exits(self, timeout: float) -> int | None:
        """Return the exit code once every process has exited or one has failed; None at timeout."""
        countdown = Countdown(timeout)
        while not self._processes.all_exited:
            self._end_delivered()
            event = self._processes.next_event(countdown)
            match event:
                case Death() if event.name == GATEWAY:
                    self._drain_frontends()
                case Death() if event.is_clean:
                    continue
                case Death() if (model := self._delivered(event.name)) is not None:
                    model.kill()
                case Death():
                    if not self._processes.survives(event):
                        self._processes.give_up(event)
                        return EXIT_CHILD_DIED
                case SupervisorEvent.RESTARTED:
                    self._send_drain()
                case SupervisorEvent.STOP:
                    return self._stop_at_once()
                case SupervisorEvent.TIMEOUT:
                    return None
        return EXIT_OK

    def _stop_at_once(self) -> int:
        """Stop after a second signal."""
        say("second signal: stopped at once")
        programs = (GATEWAY,) if self._has_journal else CLIENT_FACING
        self._processes.fail_clients(STOPPED_AT_ONCE, programs)
        return EXIT_FORCED

    def _delivered(self, name: str) -> ModelProcesses | None:
        """Return the model of a process, if its clients have everything."""
        model = self._processes.model_of(name)
        return model if model is not None and model.all_is_delivered else None

    def _end_delivered(self) -> None:
        """Kill what is left of a model some time after its clients have everything.

        A process that hangs or was stopped does not exit.
        """
        for model in self._processes.live_models:
            name = model.plan.name
            if model.is_over:  # others that wait for its memory have their turn
                self._processes.host.forget(name)
            if name not in self._grace:
                if model.all_is_delivered:
                    self._grace[name] = Countdown(EXIT_GRACE_S)
            elif not self._grace[name].left():
                model.kill()
