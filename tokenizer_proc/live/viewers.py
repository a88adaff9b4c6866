"""The clients that watch the live feed, and what they are sent.

The scheduler makes each message once. It knows no viewer, only for how long there is one: each
viewer renews its subscription, and a client that is gone does not.
"""

import asyncio
import math
import time
from collections.abc import Callable

from quadriga.clock import now
from quadriga.errors import InvalidRequest, QueueFull
from quadriga.wire.messages.live import MAX_WATCH_S, LiveServer
from quadriga.wire.messages.public import Watch
from quadriga.wire.messages.to_scheduler import WatchSteps
from quadriga.wire.sockets import encode
from tokenizer_proc.clients import Clients
from tokenizer_proc.live.processes import ProcessUsage
from tokenizer_proc.open_requests import SchedulerLink

MAX_VIEWERS = 64
SERVER_INTERVAL_S = 1.0


class Viewers:
    """Pass the feed on to the clients that watch it.

    A message that a client's socket has no room for is dropped, and counted.

    Args:
        scheduler: makes the feed.
        clients: sends messages to clients.
        usage: reads what the processes use.
        num_open: returns the number of open requests.
        clock: in seconds.
    """

    def __init__(
        self,
        scheduler: SchedulerLink,
        clients: Clients,
        usage: ProcessUsage,
        num_open: Callable[[], int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._scheduler = scheduler
        self._clients = clients
        self._usage = usage
        self._num_open = num_open
        self._clock = clock
        self._until: dict[bytes, float] = {}
        self._reporting: asyncio.Task[None] | None = None
        self._num_dropped = 0

    def watch(self, client: bytes, message: Watch) -> None:
        """Begin, renew or end a subscription.

        Raises:
            InvalidRequest: the time is not one, or there are several replicas.
            QueueFull: too many clients watch.
        """
        seconds = message.seconds
        if not (math.isfinite(seconds) and 0 <= seconds <= MAX_WATCH_S):
            raise InvalidRequest(
                f"seconds is {seconds}: 0 to {MAX_WATCH_S:g} are allowed; renew the subscription"
                " to watch for longer",
                "seconds",
            )
        self._expire()
        if seconds == 0:
            self.forget(client)
            return
        is_new = client not in self._until
        if is_new and len(self._until) >= MAX_VIEWERS:
            raise QueueFull(
                f"{MAX_VIEWERS} clients watch, and no more may; try again in {MAX_WATCH_S:g} s, or"
                " watch by the web gateway, whose viewers count once",
                MAX_WATCH_S,
            )
        self._scheduler.send(WatchSteps(seconds, is_new))
        self._until[client] = self._clock() + seconds
        if self._reporting is None:
            self._reporting = asyncio.get_running_loop().create_task(self._report())

    def forget(self, client: bytes) -> None:
        """End the subscription of a client, if it has one."""
        if self._until.pop(client, None) is not None and not self._until:
            self._scheduler.send(WatchSteps(0.0))

    def show(self, frame: bytes) -> None:
        """Send an encoded message to every viewer that has room for it."""
        self._expire()
        for client in list(self._until):
            self._num_dropped += not self._clients.offer(client, frame)

    def close(self) -> None:
        """End every subscription."""
        self._until.clear()
        if self._reporting is not None:
            self._reporting.cancel()

    def _expire(self) -> None:
        now_s = self._clock()
        for client in [client for client, until in self._until.items() if until <= now_s]:
            self.forget(client)

    async def _report(self) -> None:
        """Send what the processes use, at the interval, as long as clients watch."""
        loop = asyncio.get_running_loop()
        try:
            while self._until:
                processes = await loop.run_in_executor(None, self._usage.read)
                self.show(
                    encode(
                        LiveServer(
                            time=now(),
                            processes=processes,
                            refused=self._clients.num_refused,
                            open_requests=self._num_open(),
                            viewers=len(self._until),
                            dropped=self._num_dropped,
                        )
                    )
                )
                await asyncio.sleep(SERVER_INTERVAL_S)
                self._expire()
        finally:
            self._reporting = None
