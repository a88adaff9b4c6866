"""The waiting queue that the flags ask for."""

from collections.abc import Callable

from quadriga.config.scheduler_args import SchedulerArgs
from scheduler_proc.policies.base import (
    FirstComeFirstServed,
    Pack,
    PriorityFirst,
    ShortestFirst,
    WaitingQueue,
)
from scheduler_proc.policies.fair import FairClients
from scheduler_proc.policies.prefix import WINDOW, DepthFirst, Locate, LongestPrefixFirst

DEFAULT_PACK_LOOKAHEAD = 32
DEFAULT_PACK_FIFO_EVERY = 8
FAIR_WINDOW = 8
"""With --fair-clients, so many requests of each client are looked at in the prefix tree: in a step
that serves 16 clients, as many as without."""


def make_queue(args: SchedulerArgs, locate: Locate, page_size: int) -> WaitingQueue:
    """--schedule-policy, for each client apart with --fair-clients. locate: as in
    prefix.py; the other policies never call it."""
    window = FAIR_WINDOW if args.fair_clients else WINDOW
    queues: dict[str, Callable[[], WaitingQueue]] = {
        "fcfs": FirstComeFirstServed,
        "shortest": ShortestFirst,
        "priority": PriorityFirst,
        "pack": lambda: Pack(
            args.pack_lookahead or DEFAULT_PACK_LOOKAHEAD,
            args.pack_fifo_every or DEFAULT_PACK_FIFO_EVERY,
        ),
        "lpm": lambda: LongestPrefixFirst(locate, page_size, window),
        "dfs-weight": lambda: DepthFirst(locate, window),
    }
    make = queues[args.schedule_policy]
    return FairClients(make) if args.fair_clients else make()
