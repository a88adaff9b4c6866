"""The rules that the flags ask for."""

from quadriga.server.config.engine_args import SchedulerArgs
from scheduler_proc.planning.admission import CoreState
from scheduler_proc.planning.batching import Batching, ContinuousBatching
from scheduler_proc.planning.static_batching import StaticBatching


def make_batching(args: SchedulerArgs, state: CoreState) -> Batching:
    """Return the rule of --batching."""
    return (StaticBatching if args.batching == "static" else ContinuousBatching)(state)
