"""The driver process: one task for each replica places it, watches it, and places it again.

Where the number of replicas follows the load (Autoscaler), tasks come and go.

It is the only process that knows the cluster. It carries no request: frontend and replicas are
connected directly.
"""

import asyncio
import dataclasses
import logging
from collections.abc import Callable
from contextlib import suppress
from itertools import count, islice

from cluster_proc.crews import Crews, PlacedCrew, RayCrews, Report
from cluster_proc.scaling import Scaling, ScalingLimits
from quadriga.errors import ConfigError, ServerFailed
from quadriga.server.config import engine_args, frontend_args, server_config
from quadriga.server.processes.child import Child, run_child
from quadriga.server.processes.control_channel import Command
from quadriga.server.processes.machine import other_version, runs_on_gpu
from quadriga.server.processes.page_sources import format_sources
from quadriga.server.processes.replicas import DIED, JOINED, LEAVING, LEFT, LOST, RESTARTED
from quadriga.wire import curve, links


class Autoscaler:
    """Looks at the load when it is reported, and when a decision is due.

    Needs a running event loop. Without a load, and with the least number of replicas, it does
    nothing.

    Args:
        args: the bounds and times.
        resize: called with the number of replicas that there should be, when it changes.
    """

    def __init__(self, args: engine_args.ReplicaArgs, resize: Callable[[int], None]) -> None:
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
        """Note the number of open requests, and change the number of replicas if that is due."""
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


# The driver process: one task for each replica places it, watches it, and places it again.
#
# Where the number of replicas follows the load, tasks come and go.
#
# It is the only process that knows the cluster. It carries no request: frontend and replicas are
# connected directly.

# After this time without a place, the log says what is wanted and what there is.
NO_PLACE_S = 10.0
# Between the loss of a replica and its next start; twice as long after each start that fails.
MIN_PAUSE_S, MAX_PAUSE_S = 0.5, 30.0


def main() -> None:
    """Run `python -m cluster_proc`."""
    run_child("cluster_proc", _run, low_priority=True)


def _run(child: Child) -> None:
    config = child.config
    crews = RayCrews(config.replicas, config.worker.tp, runs_on_gpu(config.worker))
    check_keys(config, crews.host)
    if crews.bundle.num_machines > 1:
        child = dataclasses.replace(child, config=config.replace(nnodes=crews.bundle.num_machines))
    asyncio.run(_drive(child, crews))


async def _drive(child: Child, crews: Crews) -> None:
    driver, control = Driver(child, crews), child.control

    def obey() -> None:
        for command, argument in control.read_commands():
            driver.obey(command, argument)

    control.answer_in_loop()
    asyncio.get_running_loop().add_reader(control.fileno(), obey)
    await driver.keep_all()


class Driver:
    """Keeps the replicas of a cluster until the server has drained.

    Args:
        child: the flags and the channel to the launcher.
        crews: starts crews on the machines of the cluster.
    """

    def __init__(self, child: Child, crews: Crews) -> None:
        self._child = child
        self._crews = crews
        self._key_id = curve.inner_key_id(child.config.frontend.curve_dir)
        self._keepers: dict[int, asyncio.Task[None]] = {}
        self._ended: asyncio.Queue[int] = asyncio.Queue()
        self._running: dict[int, PlacedCrew] = {}
        self._joined: set[int] = set()
        # Where replicas give KV pages to the others.
        self._page_sources: dict[int, str] = {}
        self._num_sources_sent = 0
        self._leaving: set[int] = set()
        self._given_up: set[int] = set()
        replicas = child.config.replicas
        self._autoscaler = Autoscaler(replicas, self.resize) if replicas.follows_load else None
        self._is_ready = False
        self._is_draining = False

    async def keep_all(self) -> None:
        """Keep all replicas; end when the last one has left.

        Raises:
            ServerFailed: a replica cannot start, and the server has not served yet.
        """
        for number in range(self._child.config.replicas.num_at_start):
            self._start(number)
        try:
            while self._keepers:
                number = await self._ended.get()
                self._given_up.discard(number)
                await self._keepers.pop(number)
        finally:
            for keeper in self._keepers.values():
                keeper.cancel()
            await asyncio.gather(*self._keepers.values(), return_exceptions=True)
            self._crews.close()

    def _start(self, number: int) -> None:
        keeper = self._keepers[number] = asyncio.create_task(self._keep(number))
        keeper.add_done_callback(lambda _: self._ended.put_nowait(number))

    def resize(self, wanted: int) -> None:
        """Add replicas, or let some leave, until there are as many.

        Those leave first that have not joined yet; the others give their requests back before.
        """
        if self._is_draining:
            return
        staying = [number for number in self._keepers if number not in self._leaving]
        free = (number for number in count() if number not in self._keepers)
        for number in list(islice(free, max(0, wanted - len(staying)))):
            self._start(number)
        staying.sort(key=lambda number: (number not in self._joined, number))
        for number in staying[wanted:]:
            self._leaving.add(number)
            if number in self._joined:
                self._report(number, LEAVING, "")
            else:
                self._give_up(number)

    def _give_up(self, number: int) -> None:
        """End a replica without requests. A second cancellation would interrupt its end."""
        if number not in self._given_up:
            self._given_up.add(number)
            self._keepers[number].cancel()

    def obey(self, command: Command, argument: str) -> None:
        """Carry out a command of the launcher."""
        if command is Command.DRAIN:
            self._is_draining = True
            for number in self._keepers:
                if number not in self._joined:
                    self._give_up(number)
        elif command is Command.LOAD and self._autoscaler is not None and self._is_ready:
            self._autoscaler.on_load(int(argument))
        elif command is Command.REMOVE and int(argument) in self._leaving:
            self._give_up(int(argument))
        elif command is Command.ABORT:
            for crew in self._running.values():
                crew.send(f"{command.value} {argument}")
        elif command is Command.RELOAD and int(argument) in self._running:
            self._running[int(argument)].send(command.value)

    # --- one replica ------------------------------------------------------------------------------

    async def _keep(self, number: int) -> None:
        """Run a replica, again and again, until the server drains or the replica leaves."""
        with suppress(asyncio.CancelledError):  # it has no requests, and is not needed any more
            await self._run_again_and_again(number)
        self._joined.discard(number)
        if number in self._leaving:
            self._leaving.discard(number)
            self._report(number, LEFT, "")

    async def _run_again_and_again(self, number: int) -> None:
        num_failures = 0
        while not (self._is_draining or number in self._leaving):
            reason = await self._run_once(number)
            num_failures = 0 if number in self._joined else num_failures + 1
            self._joined.discard(number)
            if reason is None:
                return
            if not self._is_ready:
                raise ServerFailed(f"replica {number} cannot start: {reason}")
            if num_failures:
                logging.warning("replica %d cannot start again: %s", number, reason)
            self._report(number, LOST, reason)
            await asyncio.sleep(min(MAX_PAUSE_S, MIN_PAUSE_S * 2**num_failures))

    async def _run_once(self, number: int) -> str | None:
        """Run a replica from its place to its end. Return why it is lost; None if it has left."""
        port = links.ReservedPort(self._crews.host)
        arguments = ["--replica", str(number), "--delivery-address", port.address]
        arguments += ["--inner-key-id", self._key_id]
        role = self._child.config.replicas.role_of(number)
        crew = self._crews.new_crew([*arguments, *self._child.config.to_argv()], role)
        try:
            await self._place(number, crew)
            self._running[number] = crew
            async for report in crew.reports():
                if report["report"] == "left":
                    return None
                if report["report"] == LOST:
                    return str(report["reason"])
                if report["report"] == JOINED:
                    who = f"the replica at {report['address']}"
                    if refusal := other_version(who, report["version"]):
                        return refusal
                self._pass_on(number, report, port.address)
            return "its crew has ended"
        finally:
            self._running.pop(number, None)
            if self._page_sources.pop(number, None) is not None:
                self._send_page_sources()
            await crew.close()
            port.close()

    async def _place(self, number: int, crew: PlacedCrew) -> None:
        """Wait for a machine with room; say in the log what is wanted if that takes long."""
        role = self._child.config.replicas.role_of(number)
        placing = asyncio.create_task(crew.place())
        try:
            done, _ = await asyncio.wait({placing}, timeout=NO_PLACE_S)
            if not done:
                logging.warning(
                    "replica %d waits for %s; the cluster has %s. Stop other"
                    " work there, add a machine, or start with less --dp or --replica-cpus",
                    number, self._crews.bundle_of(role), "; ".join(self._crews.machines),
                )  # fmt: skip
            await placing
        finally:
            placing.cancel()

    def _pass_on(self, number: int, report: Report, delivery: str) -> None:
        """Pass a report of a crew on to the launcher."""
        kind = report["report"]
        if kind == JOINED:
            self._joined.add(number)
            self._report(number, JOINED, f"{report['address']} {delivery}")
            if self._child.config.replicas.has_roles:
                if report["pages"]:
                    self._page_sources[number] = report["pages"]
                self._send_page_sources()
            self._report_ready(report)
        elif kind in (DIED, RESTARTED):
            self._report(number, kind, report["process"])

    def _send_page_sources(self) -> None:
        """Say to every replica where the others give KV pages."""
        self._num_sources_sent += 1
        sources = format_sources(self._page_sources)
        line = f"{Command.SOURCES.value} {self._num_sources_sent} {sources}"
        for crew in self._running.values():
            crew.send(line)

    def _report_ready(self, report: Report) -> None:
        """Report that the server serves, once all replicas have joined for the first time."""
        if not self._is_ready and len(self._joined) == self._child.config.replicas.num_at_start:
            self._is_ready = True
            self._child.ready(**report["info"])

    def _report(self, number: int, state: str, argument: str) -> None:
        self._child.control.report("replica", replica=number, state=state, argument=argument)


def check_keys(config: server_config.ServerConfig, host: str) -> None:
    """Raise ConfigError where strangers could reach the links between the machines."""
    args = config.frontend
    if not (args.curve_dir or args.insecure or frontend_args.is_loopback(host)):
        raise ConfigError(
            f"the links between the machines of the cluster use {host}, which other machines may"
            " reach, and there are no keys: make some with quadriga keygen DIR, copy DIR to every"
            " machine and add --curve-dir DIR, or add --insecure if every machine there may connect"
        )
