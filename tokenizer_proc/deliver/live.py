"""The live feed at the frontend: the clients that watch, and what the server's processes use."""

import asyncio
import math
import time
from collections.abc import Callable, Iterable

import psutil

from quadriga.clock import now
from quadriga.errors import InvalidRequest, QueueFull
from quadriga.server.config.engine_args import check_replica
from quadriga.wire import sockets, to_scheduler
from quadriga.wire.client import Watch
from quadriga.wire.live import MAX_WATCH_S, LiveProcess, LiveServer
from tokenizer_proc.deliver.clients import Clients

MAX_PROCESSES = 64
LIST_INTERVAL_S = 5.0  # the list of processes costs more than their numbers


class ProcessUsage:
    """Read what the processes use.

    Args:
        launcher: process id of the launcher.
    """

    def __init__(self, launcher: int) -> None:
        self._launcher = launcher
        self._processes: dict[psutil.Process, str] = {}
        self._listed_at = 0.0

    def read(self) -> list[LiveProcess]:
        """Return the usage of each process. It reads files, so that it should run in a thread."""
        now = time.monotonic()
        if now - self._listed_at >= LIST_INTERVAL_S:
            self._list(now)
        usage = list(self._usage())
        if len(usage) < len(self._processes):  # one has ended, and another may have its place
            self._list(now)
            usage = list(self._usage())
        return usage

    def _list(self, now: float) -> None:
        self._listed_at = now
        try:
            launcher = psutil.Process(self._launcher)
            found = [launcher, *launcher.children(recursive=True)][:MAX_PROCESSES]
        except psutil.Error:
            found = []
        self._processes = {process: self._name_of(process) for process in found}

    def _name_of(self, process: psutil.Process) -> str:
        if process.pid == self._launcher:
            return "launcher"
        try:
            return process_name(process.cmdline(), process.ppid() == self._launcher)
        except psutil.Error:
            return ""

    def _usage(self) -> Iterable[LiveProcess]:
        for process, name in self._processes.items():
            try:
                with process.oneshot():
                    times, memory = process.cpu_times(), process.memory_info()
                    started_at = process.create_time()
            except psutil.Error:
                continue
            cpu_seconds = times.user + times.system
            yield LiveProcess(name, process.pid, cpu_seconds, memory.rss, started_at)


def process_name(command: list[str], is_child: bool) -> str:
    """Return the name of a process.

    Args:
        command: its command line, in which the server's own have a word such as `http_proc`.
        is_child: it is a child of the launcher; a child of another process has a mark.
    """
    program = (command or ["?"])[0].rsplit("/", 1)[-1]
    name = next((word for word in command if word.endswith("_proc")), program)
    return name if is_child else f"{name} (child)"


# The clients that watch the live feed, and what they are sent.
#
# The scheduler makes each message once. It knows no viewer, only for how long there is one: each
# viewer renews its subscription, and a client that is gone does not.

MAX_VIEWERS = 64
SERVER_INTERVAL_S = 1.0
Watched = tuple[bytes, int]  # a client, and the number of a replica


class Viewers:
    """Pass the feed on to the clients that watch it.

    A message that a client's socket has no room for is dropped, and counted.

    Args:
        scheduler: makes the feed.
        clients: sends messages to clients.
        usage: reads what the processes use.
        num_open: returns the number of open requests.
        num_replicas: number of replicas, of which each makes a feed.
        clock: in seconds.
    """

    def __init__(
        self,
        scheduler: sockets.Sender,
        clients: Clients,
        usage: ProcessUsage,
        num_open: Callable[[], int],
        num_replicas: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._scheduler = scheduler
        self._clients = clients
        self._usage = usage
        self._num_open = num_open
        self._num_replicas = num_replicas
        self._clock = clock
        self._until: dict[Watched, float] = {}
        self._reporting: asyncio.Task[None] | None = None
        self._num_dropped = 0

    def watch(self, client: bytes, message: Watch) -> None:
        """Begin, renew or end a subscription.

        Raises:
            InvalidRequest: the time is out of range, or there is no such replica.
            QueueFull: too many clients watch.
        """
        seconds = message.seconds
        if not (math.isfinite(seconds) and 0 <= seconds <= MAX_WATCH_S):
            raise InvalidRequest(
                f"seconds is {seconds}: 0 to {MAX_WATCH_S:g} are allowed; renew the subscription"
                " to watch for longer",
                "seconds",
            )
        check_replica(message.replica, self._num_replicas)
        self._expire()
        watched = client, message.replica
        if seconds == 0:
            self._end(watched)
            return
        is_new = watched not in self._until
        if is_new and len(self._until) >= MAX_VIEWERS:
            raise QueueFull(
                f"{MAX_VIEWERS} clients watch, and no more may; try again in {MAX_WATCH_S:g} s, or"
                " watch by the web gateway, whose viewers count once",
                MAX_WATCH_S,
            )
        self._scheduler.send(to_scheduler.WatchSteps(seconds, is_new, message.replica))
        self._until[watched] = self._clock() + seconds
        if self._reporting is None:
            self._reporting = asyncio.get_running_loop().create_task(self._report())

    def forget(self, client: bytes) -> None:
        """End the subscriptions of a client."""
        for watched in [watched for watched in self._until if watched[0] == client]:
            self._end(watched)

    def _end(self, watched: Watched) -> None:
        replica = watched[1]
        if self._until.pop(watched, None) is not None and replica not in self._watched_replicas:
            self._scheduler.send(to_scheduler.WatchSteps(0.0, replica=replica))

    @property
    def _watched_replicas(self) -> set[int]:
        return {replica for _, replica in self._until}

    def show(self, frame: bytes, replica: int = 0) -> None:
        """Send an encoded message to every viewer of a replica that has room for it."""
        self._expire()
        self._offer(frame, [client for client, number in self._until if number == replica])

    def _offer(self, frame: bytes, clients: Iterable[bytes]) -> None:
        for client in clients:
            self._num_dropped += not self._clients.offer(client, frame)

    def close(self) -> None:
        """End every subscription."""
        self._until.clear()
        if self._reporting is not None:
            self._reporting.cancel()

    def _expire(self) -> None:
        now_s = self._clock()
        for watched in [watched for watched, until in self._until.items() if until <= now_s]:
            self._end(watched)

    async def _report(self) -> None:
        """Send what the processes use, at the interval, as long as clients watch."""
        loop = asyncio.get_running_loop()
        try:
            while self._until:
                processes = await loop.run_in_executor(None, self._usage.read)
                clients = {client for client, _ in self._until}
                report = LiveServer(
                    time=now(),
                    processes=processes,
                    refused=self._clients.num_refused,
                    open_requests=self._num_open(),
                    viewers=len(clients),
                    dropped=self._num_dropped,
                    num_replicas=self._num_replicas,
                )
                self._offer(sockets.encode(report), clients)
                await asyncio.sleep(SERVER_INTERVAL_S)
                self._expire()
        finally:
            self._reporting = None
