"""The flags of replicas that come and go in a simulation."""

import argparse
from dataclasses import dataclass
from typing import Any

from bench.simulate.fleet.fleet import Loss
from bench.simulate.run import World
from cluster_proc.scaling import Scaling, ScalingLimits
from quadriga.config.flags import check_positive, flag_name
from quadriga.config.replica_args import DOWN_AFTER_S, TARGET_REQUESTS, UP_AFTER_S
from quadriga.errors import ConfigError

# From the decision to add a replica until it serves: a machine that is there, and a small model.
START_S = 20.0


def add_fleet_changes(group: Any) -> None:
    """Add the flags."""
    add = group.add_argument
    add(
        "--lose",
        action="append",
        default=[],
        metavar="COUNT@SECONDS",
        help="lose replicas at a time; may be given several times",
    )
    add("--return-after", type=float, metavar="SECONDS", help="lost replicas come back after this")
    add("--scale", metavar="MIN:MAX", help="the number of replicas follows the load")
    add("--target-ongoing-requests", type=int, default=TARGET_REQUESTS, metavar="N",
        help="open requests for each replica, with --scale")  # fmt: skip
    add("--scale-up-after", type=float, default=UP_AFTER_S, metavar="SECONDS",
        help="of too much load, before replicas are added")  # fmt: skip
    add("--scale-down-after", type=float, default=DOWN_AFTER_S, metavar="SECONDS",
        help="of too little load, before a replica leaves")  # fmt: skip
    add("--replica-start", type=float, default=START_S, metavar="SECONDS",
        help="until a replica that is added serves")  # fmt: skip


@dataclass(frozen=True, slots=True)
class FleetChanges:
    """What happens to the replicas of a simulation.

    Attributes:
        losses: replicas that are lost.
        return_after_s: seconds after which they come back; None: not at all.
        scaling: how their number follows the load; None: it does not.
        start_s: seconds until a replica that is added serves.
    """

    losses: list[Loss]
    return_after_s: float | None
    scaling: ScalingLimits | None
    start_s: float

    @classmethod
    def of(cls, arguments: argparse.Namespace) -> "FleetChanges":
        """Read the flags, or raise ConfigError."""
        check_positive(arguments, "target_ongoing_requests")
        for name in ("return_after", "scale_up_after", "scale_down_after", "replica_start"):
            value = getattr(arguments, name)
            if value is not None and not value >= 0:
                raise ConfigError(f"{flag_name(name)} must be 0 or more (it is {value})")
        losses = [Loss.parse(text) for text in arguments.lose]
        num_lost = max((loss.count for loss in losses), default=0)
        if losses and num_lost >= arguments.replicas:
            raise ConfigError(
                f"--lose {num_lost} replicas of --replicas {arguments.replicas}: one has to stay"
            )
        if arguments.return_after is not None and not losses:
            raise ConfigError("--return-after works with --lose only")
        scaling = None if arguments.scale is None else _limits_of(arguments)
        return cls(losses, arguments.return_after, scaling, arguments.replica_start)

    def apply(self, world: World) -> None:
        """Let all this happen in a world that has not run yet."""
        for loss in self.losses:
            world.lose(loss, self.return_after_s)
        if self.scaling is not None:
            scaling = Scaling(self.scaling, len(world.replicas))
            world.fleet.follow_load(scaling, self.start_s)


def _limits_of(arguments: argparse.Namespace) -> ScalingLimits:
    low, _, high = arguments.scale.partition(":")
    if not (low.isdecimal() and high.isdecimal() and 1 <= int(low) <= int(high)):
        raise ConfigError(f"--scale is {arguments.scale!r}: give MIN:MAX, such as 1:8")
    if not int(low) <= arguments.replicas <= int(high):
        raise ConfigError(
            f"--replicas {arguments.replicas} is not within --scale {arguments.scale}"
        )
    return ScalingLimits(
        min_replicas=int(low),
        max_replicas=int(high),
        target=arguments.target_ongoing_requests,
        up_after_s=arguments.scale_up_after,
        down_after_s=arguments.scale_down_after,
    )
