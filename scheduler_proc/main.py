"""The scheduler process: sockets, poller, log lines and watchdog around the Scheduler.

`StepWatchdog` reports a worker whose step takes too long; `serve` is the loop of the process.
"""

import gc
import math
import time
from collections.abc import Callable

from quadriga.clock import RunningTime, now
from quadriga.errors import RequestFailed
from quadriga.server.models.resolve import resolve_model
from quadriga.server.processes import control_channel, logs
from quadriga.server.processes.child import Child, run_child
from quadriga.wire.sockets import Inbox, Outbox, Poller
from quadriga.wire.to_scheduler import AbortAll, SchedulerMessage
from quadriga.wire.worker import ResultMessage
from scheduler_proc.journal.writer import (
    check_number_of_replicas,
    make_header,
    of_replica,
    open_journal,
)
from scheduler_proc.kv_events.publisher import KVEvents
from scheduler_proc.lifecycle import RequestLifecycle
from scheduler_proc.observe.logs import (
    NoStatusLine,
    RequestLog,
    StatsLog,
    StatusLine,
    UsageLog,
    status_line,
)
from scheduler_proc.observe.replica_report import ReplicaReport
from scheduler_proc.pipeline import Pipeline
from scheduler_proc.request_table import first_seq_after_restart
from scheduler_proc.scheduler import Scheduler

CHECKS_PER_TIMEOUT = 16  # a suspension of this process counts as at most one of these parts


class StepWatchdog:
    """Report a worker whose step has run longer than `timeout_s`.

    Only time in which this process runs counts: a suspension of both is no fault of the worker.

    Attributes:
        wake_at: when `check` must be called, by the clock; None until the next step.
    """

    def __init__(
        self,
        timeout_s: float,
        pipeline: Pipeline,
        control: control_channel.ControlChannel,
        clock: Callable[[], float],
    ) -> None:
        """Initialize. timeout_s: 0 for none; clock: the scheduler's."""
        self.wake_at: float | None = None
        self._timeout_s = timeout_s
        self._pipeline = pipeline
        self._control = control
        self._clock = clock
        self._interval = timeout_s / CHECKS_PER_TIMEOUT
        self._time = RunningTime(self._interval, clock)
        self._step_started_at: float | None = None
        self._ends_at = math.inf

    def check(self) -> None:
        """Report the current step if it is stuck, once. Call this after every scheduler step."""
        now, started_at = self._time.now(), self._pipeline.current_step_started_at
        if started_at != self._step_started_at:
            self._step_started_at = started_at
            has_limit = self._timeout_s and started_at is not None
            self._ends_at = now + self._timeout_s if has_limit else math.inf
        if now >= self._ends_at:
            self._ends_at = math.inf
            why = f"a step has run for {self._timeout_s:g} s"
            self._control.report("stuck", process="worker_proc", why=why)
        left = self._ends_at - now
        self.wake_at = None if left == math.inf else self._clock() + min(left, self._interval)


# The scheduler process: sockets, poller, status line and watchdog around the Scheduler.

MAX_MESSAGES_PER_STEP = 256  # more would delay the next plan
# Between two looks at the inbox in a batch delay. To be woken by each message would take the CPU
# time of the frontend, which often has the same core.
POLL_INTERVAL_S = 0.0007


def main() -> None:
    """Run the process."""
    run_child("scheduler_proc", serve, low_priority=True)


def serve(child: Child) -> None:
    """Run the scheduler until it stops."""
    inbox: Inbox[SchedulerMessage] = Inbox(
        child.endpoints.scheduler, SchedulerMessage, child.endpoints.links.prepare_bind
    )
    results: Inbox[ResultMessage] = Inbox(child.endpoints.results, ResultMessage)
    model, run_dir = resolve_model(child.config.model), child.endpoints.run_dir
    header = make_header(run_dir, child.config.model.source, model)
    args = of_replica(child.config.scheduler, child.replica)
    if child.replica.number == 0 and not child.is_restart:
        check_number_of_replicas(child.config.scheduler, child.replica.num_replicas)
    journal, recovered = open_journal(args, run_dir, header, child.is_restart)
    scheduler = Scheduler(
        args=args,
        eos_ids=model.eos_token_ids,
        worker=Outbox(child.endpoints.worker),
        detok=Outbox(child.endpoints.detok),
        clock=now,
        journal=journal,
    )
    usage_log = _add_observers(child, scheduler.lifecycle)
    kv_events = _publish_kv_events(child, scheduler.lifecycle)
    scheduler.lifecycle.restore(recovered, first_seq_after_restart() if child.is_restart else 0)
    if child.is_restart:
        scheduler.announce_restart()
    child.ready()
    child.control.answer_in_loop()
    # The scheduler makes no reference cycles (a test checks that), so reference counting frees
    # everything; a search for cycles among 10,000 requests would cost a step 20 ms.
    gc.disable()
    poller = Poller(inbox, results, child.control)
    launch = child.config.launch
    status = _status(child, scheduler)
    watchdog = StepWatchdog(launch.watchdog_timeout, scheduler.pipeline, child.control, now)
    wake_at: float | None = None
    while not scheduler.stopped:
        if scheduler.pipeline.in_batch_delay(now()):
            time.sleep(POLL_INTERVAL_S)
        else:
            poller.wait(_seconds_until(wake_at, status.wake_at, watchdog.wake_at))
        _carry_out_commands(child, scheduler)
        wake_at = scheduler.step(inbox.drain(MAX_MESSAGES_PER_STEP), results.drain())
        _report_pause(child, scheduler)
        status.update(now())
        watchdog.check()
    status.close()
    if kv_events is not None:
        kv_events.close()
    if usage_log is not None:
        usage_log.close()


def _carry_out_commands(child: Child, scheduler: Scheduler) -> None:
    """Carry out the commands of the launcher that have arrived."""
    for command, argument in child.control.read_commands():
        match command:
            case control_channel.Command.ABORT:
                scheduler.step([AbortAll(argument)], [])
            case control_channel.Command.FAIL_ALL:
                scheduler.fail_all(RequestFailed(argument))
            case control_channel.Command.PAUSE:
                scheduler.pause.begin(int(argument))


def _report_pause(child: Child, scheduler: Scheduler) -> None:
    """Report a pause once it is complete."""
    num_tokens = scheduler.pause.take_report()
    if num_tokens is not None:
        number = child.replica.number
        child.control.report("replica", replica=number, state="paused", argument=str(num_tokens))


def _add_observers(child: Child, lifecycle: RequestLifecycle) -> UsageLog | None:
    """Add what the flags ask for to be noted or reported of requests. Return the usage log."""
    log_level = logs.RequestLogLevel.of(child.config.launch)
    replicas = child.config.replicas
    is_prefill = replicas.computes_prompts(child.number)
    lifecycle.report = ReplicaReport(replicas.survives_loss, is_prefill)
    if not log_level.is_off:
        lifecycle.end_observers.append(RequestLog(log_level))
    path = child.config.tenants.usage_log
    usage_log = UsageLog(path) if path else None
    if usage_log is not None:
        lifecycle.end_observers.append(usage_log)
    return usage_log


def _publish_kv_events(child: Child, lifecycle: RequestLifecycle) -> KVEvents | None:
    """Publish the events of the prefix cache, if --kv-events-config says so."""
    config = child.config.scheduler.kv_events
    if not config.is_on:
        return None
    number = child.replica.number
    events = KVEvents(config.of_replica(number), number, now, lifecycle.adapters.name_of)
    lifecycle.pool_observers.append(events)
    return events


def _status(child: Child, scheduler: Scheduler) -> StatusLine:
    """Return the live line of a terminal, or without one the throughput line of the log."""
    line = status_line(child.has_status_line, scheduler.info)
    interval_s = child.config.launch.log_stats_interval
    if isinstance(line, NoStatusLine) and interval_s:
        return StatsLog(interval_s, scheduler.info)
    return line


def _seconds_until(*times: float | None) -> float | None:
    """Return the seconds until the first of the times; None where there is none."""
    first = min((time for time in times if time is not None), default=None)
    return None if first is None else max(0.0, first - now())
