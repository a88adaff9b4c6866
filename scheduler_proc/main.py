"""The process around the scheduler: sockets in, sockets out, one poller."""

import gc
import time

from quadriga.messages.to_scheduler import AbortAll, SchedulerMessage, Submit
from quadriga.messages.worker import ResultMessage
from quadriga.model_source import resolve_model
from quadriga.process import ABORT, Child, run_child
from quadriga.sockets import Inbox, Outbox, Poller
from scheduler_proc.scheduler import Scheduler

MESSAGES_A_ROUND = 256
"""So many requests are taken in before the worker is looked after again."""
QUIETS_GATHERED = 5


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
    # What the scheduler makes has no reference cycles (a test holds that), so reference counting
    # frees all of it; looking for cycles among 10,000 requests would cost a step 20 ms.
    gc.disable()
    poller = Poller(inbox, results, child.lifeline)
    while not scheduler.stopped:
        poller.wait(_until(scheduler.wake_at))
        for order, reason in child.lifeline.take_orders():
            if order == ABORT:
                scheduler.iterate([AbortAll(reason)], [])
        messages = list(inbox.drain(MESSAGES_A_ROUND))
        if scheduler.idle and any(isinstance(message, Submit) for message in messages):
            messages += _gather(inbox, scheduler.patience)
        scheduler.iterate(messages, results.drain())


def _until(moment: float | None) -> float | None:
    return None if moment is None else max(0.0, moment - time.time())


def _gather(inbox: "Inbox[SchedulerMessage]", quiet: float) -> list[SchedulerMessage]:
    """What else comes at the same time, while the worker has nothing to do: until nothing has come
    for `quiet` seconds. Whoever just misses a step waits for the whole of it."""
    messages: list[SchedulerMessage] = []
    poller, deadline = Poller(inbox), time.monotonic() + QUIETS_GATHERED * quiet
    while time.monotonic() < deadline and poller.wait(quiet):
        messages += inbox.drain(MESSAGES_A_ROUND)
    return messages
