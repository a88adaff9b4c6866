"""The process around the scheduler: sockets in, sockets out, one poller."""

import gc
import itertools
import time

from quadriga.clock import now
from quadriga.model_files.resolve import resolve_model
from quadriga.runtime.child import Child, Command, run_child
from quadriga.runtime.fault_injection import faulty_inbox
from quadriga.wire.messages.to_scheduler import AbortAll, SchedulerMessage
from quadriga.wire.messages.worker import ResultMessage
from quadriga.wire.sockets import Inbox, Outbox, Poller
from scheduler_proc.durability.journal_opening import header_of, open_journal
from scheduler_proc.observe.status_line import status_line
from scheduler_proc.request_table import first_number
from scheduler_proc.scheduler import Scheduler
from scheduler_proc.step_watchdog import StepWatchdog

MESSAGES_A_ROUND = 256
"""So many requests are taken in before the worker is looked after again."""
POLL_INTERVAL_S = 0.0007
"""Between two looks at who has come, while others are expected: to be woken for each of them would
take the time of the front door, which often has the same core."""


def main() -> None:
    run_child("scheduler_proc", serve, low_priority=True)


def serve(child: Child) -> None:
    inbox: Inbox[SchedulerMessage] = Inbox(child.endpoints.scheduler, SchedulerMessage)
    inner = Inbox[ResultMessage](child.endpoints.results, ResultMessage)
    model, run_dir = resolve_model(child.config.model), child.endpoints.run_dir
    header = header_of(run_dir, child.config.model.shown_name, model)
    journal, found = open_journal(child.config.scheduler, run_dir, header, child.is_restart)
    scheduler = Scheduler(
        args=child.config.scheduler,
        eos_ids=model.eos_token_ids,
        worker=Outbox(child.endpoints.worker),
        detok=Outbox(child.endpoints.detok),
        clock=now,
        journal=journal,
    )
    strikes = itertools.count()
    results = faulty_inbox(
        inner,
        "scheduler",
        child.config.launch.fault,
        retract=lambda: scheduler.retract_one(next(strikes)),
    )
    scheduler.arrivals.take_up(found, first_number() if child.is_restart else 0)
    if child.is_restart:
        scheduler.greet()
    child.ready()
    child.control.answer_in_loop()
    # What the scheduler makes has no reference cycles (a test holds that), so reference counting
    # frees all of it; looking for cycles among 10,000 requests would cost a step 20 ms.
    gc.disable()
    poller = Poller(inbox, results, child.control)
    status = status_line(not child.config.launch.no_status_line, scheduler.info)
    launch = child.config.launch
    deadline = StepWatchdog(launch.watchdog_timeout, scheduler.pipeline, child.control, now)
    while not scheduler.stopped:
        if scheduler.pipeline.in_batch_delay(now()):
            time.sleep(POLL_INTERVAL_S)
        else:
            poller.wait(_until(scheduler.wake_at, status.wake_at, deadline.wake_at))
        for order, reason in child.control.read_commands():
            if order is Command.ABORT:
                scheduler.iterate([AbortAll(reason)], [])
        scheduler.iterate(inbox.drain(MESSAGES_A_ROUND), results.drain())
        status.update(now())
        deadline.check()
    status.close()


def _until(*moments: float | None) -> float | None:
    """Seconds until the first of them; None where there is none."""
    first = min((moment for moment in moments if moment is not None), default=None)
    return None if first is None else max(0.0, first - now())
