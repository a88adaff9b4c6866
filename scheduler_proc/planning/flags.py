"""The rules that the flags ask for: the waiting queue, the turns of decode rows, the batching."""

from quadriga.server.config.engine_args import SchedulerArgs
from scheduler_proc.planning.admission import CoreState
from scheduler_proc.planning.batching import Batching, ContinuousBatching
from scheduler_proc.planning.fairness import (
    FairShares,
    WeightedTurns,
    client_share,
    tenant_share,
    user_share,
)
from scheduler_proc.planning.policies import (
    REGISTRY,
    WINDOW,
    MatchPrefix,
    PolicyContext,
    WaitingQueue,
)
from scheduler_proc.planning.static_batching import StaticBatching
from scheduler_proc.state.batch import NextRows, take_turns

# Of each client: a step that serves 16 clients then looks at as many requests as without fairness.
FAIR_WINDOW = 8


def make_queue(args: SchedulerArgs, match_prefix: MatchPrefix, page_size: int) -> WaitingQueue:
    """Return the queue of --schedule-policy.

    With --fair-clients each client has one of its own, with tenants each user of a tenant.

    Args:
        args: flags of the scheduler.
        match_prefix: as in PolicyContext; only the policies that look at the prefix tree call it.
        page_size: number of tokens in a page.
    """
    window = FAIR_WINDOW if args.is_fair else WINDOW
    context = PolicyContext(args, match_prefix, page_size, window)

    def make_one() -> WaitingQueue:
        return REGISTRY[args.schedule_policy].create(context)

    def make_users() -> WaitingQueue:
        return FairShares(make_one, user_share)

    if args.fair_tenants:
        return FairShares(make_users, tenant_share)
    return FairShares(make_one, client_share) if args.fair_clients else make_one()


def make_turns(args: SchedulerArgs) -> NextRows:
    """Return how decode rows are given: equally, or with tenants by weight."""
    return WeightedTurns(tenant_share).next_rows if args.fair_tenants else take_turns


def make_batching(args: SchedulerArgs, state: CoreState) -> Batching:
    """Return the rule of --batching."""
    return (StaticBatching if args.batching == "static" else ContinuousBatching)(state)
