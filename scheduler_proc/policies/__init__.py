"""The waiting queue and the decode turns that the flags ask for."""

from quadriga.config.scheduler_args import SchedulerArgs
from quadriga.tenants.tenant import parent_name
from scheduler_proc.policies.base import REGISTRY, MatchPrefix, PolicyContext, WaitingQueue
from scheduler_proc.policies.fair import FairClients
from scheduler_proc.policies.prefix import WINDOW
from scheduler_proc.policies.tenants import FairTenants
from scheduler_proc.policies.weighted_turns import WeightedTurns
from scheduler_proc.state.batch import NextRows, take_turns

# Of each client: a step that serves 16 clients then looks at as many requests as without fairness.
FAIR_WINDOW = 8


def make_queue(args: SchedulerArgs, match_prefix: MatchPrefix, page_size: int) -> WaitingQueue:
    """Return the queue of --schedule-policy.

    With --fair-clients each client has one of its own, with --fair-tenants each user of a tenant.

    Args:
        args: flags of the scheduler.
        match_prefix: as in PolicyContext; only the policies of prefix.py call it.
        page_size: number of tokens in a page.
    """
    window = FAIR_WINDOW if args.is_fair else WINDOW
    context = PolicyContext(args, match_prefix, page_size, window)

    def make_one() -> WaitingQueue:
        return REGISTRY[args.schedule_policy].create(context)

    def make_users() -> WaitingQueue:
        return FairTenants(make_one, lambda request: request.tenant, lambda _: 1.0)

    if args.fair_tenants:
        return FairTenants(
            make_users,
            lambda request: parent_name(request.tenant),
            lambda request: request.weight,
        )
    return FairClients(make_one) if args.fair_clients else make_one()


def make_turns(args: SchedulerArgs) -> NextRows:
    """Return how decode rows are given: equally, or with --fair-tenants by weight."""
    return WeightedTurns().next_rows if args.fair_tenants else take_turns
