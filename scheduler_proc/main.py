"""The process around the scheduler: sockets in, sockets out, one poller."""

import gc
import time

from quadriga.messages import AbortAll, ResultMessage, SchedulerMessage
from quadriga.model_source import resolve_model
from quadriga.process import ABORT, Child, run_child
from quadriga.sockets import Inbox, Outbox, Poller
from scheduler_proc.scheduler import Scheduler

MESSAGES_A_ROUND = 256
"""So many requests are taken in before the worker is looked after again."""


def main() -> None:
    run_child("scheduler_proc", serve, niceness=5)


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
        scheduler.iterate(inbox.drain(MESSAGES_A_ROUND), results.drain())
