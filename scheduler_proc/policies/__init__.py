"""The waiting queue that the flags ask for."""

from quadriga.config.scheduler_args import SchedulerArgs
from scheduler_proc.policies.base import REGISTRY, MatchPrefix, PolicyContext, WaitingQueue
from scheduler_proc.policies.fair import FairClients
from scheduler_proc.policies.prefix import WINDOW

# Of each client: a step that serves 16 clients then looks at as many requests as without fairness.
FAIR_WINDOW = 8


def make_queue(args: SchedulerArgs, match_prefix: MatchPrefix, page_size: int) -> WaitingQueue:
    """Return the queue of --schedule-policy; with --fair-clients each client has one of its own.

    Args:
        args: flags of the scheduler.
        match_prefix: as in PolicyContext; only the policies of prefix.py call it.
        page_size: number of tokens in a page.
    """
    window = FAIR_WINDOW if args.fair_clients else WINDOW
    context = PolicyContext(args, match_prefix, page_size, window)
    create = REGISTRY[args.schedule_policy].create
    return FairClients(lambda: create(context)) if args.fair_clients else create(context)
