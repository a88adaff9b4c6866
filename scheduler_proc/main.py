"""The process around the scheduler: sockets in, sockets out, one poller."""

import gc
import time

from quadriga.messages import AbortAll, ResultMessage, SchedulerMessage, Submit
from quadriga.model_source import resolve_model
from quadriga.process import ABORT, Child, run_child
from quadriga.sockets import Inbox, Outbox, Poller
from scheduler_proc.scheduler import Scheduler

MESSAGES_A_ROUND = 256
"""So many requests are taken in before the worker is looked after again."""
QUIET_SECONDS = 0.002
MOST_GATHERING_SECONDS = 0.010
"""While the worker has nothing to do, requests that come together are waited for, until none has
come for the first time, at most for the second: a step costs much the same for one row as for
several, so that whoever just misses it waits for a whole step."""


def main() -> None:
    run_child("scheduler_proc", serve, niceness=10)


def serve(child: Child) -> None:
    inbox: Inbox[SchedulerMessage] = Inbox(child.endpoints.scheduler, SchedulerMessage)
    results: Inbox[ResultMessage] = Inbox(child.endpoints.results, ResultMessage)
    scheduler = Scheduler(
        args=child.config.scheduler,
        eos_ids=resolve_model(child.config.model).eos_token_ids,
        worker=Outbox(child.endpoints.worker),
        detok=Outbox(child.endpoints.detok),
        clock=time.time,
    )
    child.ready()
    gc.freeze()
    poller = Poller(inbox, results, child.lifeline)
    while not scheduler.stopped:
        poller.wait()
        for order, reason in child.lifeline.take_orders():
            if order == ABORT:
                scheduler.iterate([AbortAll(reason)], [])
        messages = list(inbox.drain(MESSAGES_A_ROUND))
        if scheduler.idle and any(isinstance(message, Submit) for message in messages):
            messages += _gather(inbox)
        scheduler.iterate(messages, results.drain())


def _gather(inbox: "Inbox[SchedulerMessage]") -> list[SchedulerMessage]:
    """What else comes at the same time."""
    messages: list[SchedulerMessage] = []
    poller, deadline = Poller(inbox), time.monotonic() + MOST_GATHERING_SECONDS
    while time.monotonic() < deadline and poller.wait(QUIET_SECONDS):
        messages += inbox.drain(MESSAGES_A_ROUND)
    return messages
