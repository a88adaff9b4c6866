"""The info that a scheduler reports, as GET /metrics reads it."""

from typing import Any

from quadriga.server.config.engine_args import SchedulerArgs
from quadriga.wire.worker import WorkerReady
from scheduler_proc.journal.writer import NoJournal
from scheduler_proc.scheduler import Scheduler


class NoSender:
    def send(self, message: object) -> None:
        """Do nothing."""


def info_of(
    ready: bool = True, stored: bytes | None = None, fetches: bool = False
) -> dict[str, Any]:
    """Return what a scheduler reports."""
    scheduler = Scheduler(
        SchedulerArgs(), frozenset(), NoSender(), NoSender(), lambda: 1.0, NoJournal()
    )
    if ready:
        worker = WorkerReady(
            10, 16, 4, "float32", "cpu", prefill_tokens=64, stored=stored, fetches=fetches
        )
        scheduler.step([], [worker])
    return dict(scheduler.info())
