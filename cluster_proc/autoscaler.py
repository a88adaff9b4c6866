"""The number of replicas, as the load of the server asks for it."""

import asyncio
from collections.abc import Callable

from cluster_proc.scaling import Scaling, ScalingLimits
from quadriga.config.replica_args import ReplicaArgs


class Autoscaler:
    """Looks at the load when it is reported, and when a decision is due.

    Needs a running event loop. Without a load, and with the least number of replicas, it does
    nothing.

    Args:
        args: the bounds and times.
        resize: called with the number of replicas that there should be, when it changes.
    """

    def __init__(self, args: ReplicaArgs, resize: Callable[[int], None]) -> None:
        limits = ScalingLimits(
            min_replicas=args.num_at_least,
            max_replicas=args.num_slots,
            target=args.target_ongoing_requests,
            up_after_s=args.scale_up_after,
            down_after_s=args.scale_down_after,
        )
        self._scaling = Scaling(limits, args.num_at_start)
        self._resize = resize
        self._timer: asyncio.TimerHandle | None = None

    def on_load(self, num_open: int) -> None:
        """Take in the number of open requests, and change the number of replicas if that is due."""
        self._scaling.on_load(num_open, self._loop.time())
        self._look()

    def close(self) -> None:
        """Decide nothing more."""
        if self._timer is not None:
            self._timer.cancel()

    @property
    def _loop(self) -> asyncio.AbstractEventLoop:
        return asyncio.get_running_loop()

    def _look(self) -> None:
        before, wanted = self._scaling.num_replicas, self._scaling.decide(self._loop.time())
        self.close()
        if (wake_at := self._scaling.wake_at) is not None:
            self._timer = self._loop.call_at(wake_at, self._look)
        if wanted != before:
            self._resize(wanted)
