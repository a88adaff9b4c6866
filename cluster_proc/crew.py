"""A crew: keeps the processes of one replica on its machine, as the launcher does on its own.

    python -m cluster_proc.crew --replica 2 --node-host 10.0.0.7 --delivery-address tcp://…
        --inner-key-id … [--first-rank 1] [flags]

With --first-rank it is a rank crew, which keeps only the ranks that the replica has on a further
machine.

It is the child of an actor (crew_actor.py), whose control channel has the commands and reports of
every child process (quadriga/server/processes/control_channel.py). At the end of the channel the
crew leaves, and its processes with it.

| report | fields |
|---|---|
| `joined` | `address` of the scheduler, `pages`: where it gives KV pages to other machines or "",
`version` of quadriga, `info` of the worker: it serves |
| `died`, `restarted` | `process`, while the crew restarts it |
| `lost` | `reason`: a process has died for good |
| `left` | every process has finished its work |
| `ranks` | of a rank crew: `addresses` at which its ranks receive, `version` of quadriga |
"""

import argparse
import socket
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import NoReturn

from quadriga import __version__, errors, programs
from quadriga.server.config import server_config
from quadriga.server.config import server_config as configuration
from quadriga.server.models import model_impl, resolve
from quadriga.server.processes.control_channel import (
    EXIT_OK,
    EXIT_START_FAILED,
    Command,
    ControlChannel,
    continue_at_parents_death,
)
from quadriga.server.processes.machine import MAX_OPEN_FILES, allow_open_files
from quadriga.server.processes.page_sources import SourcesFile
from quadriga.server.processes.replicas import RING
from quadriga.server.processes.supervisor import Death, ReadyAgain, Supervisor, SupervisorEvent
from quadriga.wire.curve import inner_key_id
from quadriga.wire.links import ReservedPort

RANK_PROGRAM, RANK_NAME = "worker_proc.tp_rank", "worker_proc rank"


class KeptProcesses(ABC):
    """Starts the processes of a crew, and keeps them until they end or the actor ends the crew.

    A subclass handles the events, and decides which deaths the crew survives.

    Args:
        names: names of the processes.
        flags: command line flags of every process.
        program_of: returns the command that runs a process, before its flags.
        launch: limits of restarts and of the watchdog.
        ports: where its processes receive; they stay reserved as long as the crew is there.
        check_keys: raises ConfigError where this machine has other keys than the server's.
        connection: the crew's end of its control channel.
    """

    def __init__(
        self,
        names: Sequence[str],
        flags: list[str],
        program_of: Callable[[str], list[str]],
        launch: server_config.LaunchArgs,
        ports: Sequence[ReservedPort],
        check_keys: Callable[[], None],
        connection: socket.socket,
    ) -> None:
        self._names = names
        self._ports = ports
        self._check_keys = check_keys
        self._supervisor = Supervisor(flags, program_of, launch, no_restart=[])
        self._control = ControlChannel(connection, self._supervisor.run_dir)
        self._supervisor.watch(self._control.fileno())

    def run(self) -> int:
        """Keep the processes until a signal stops the crew, or it does not survive a death.

        Returns:
            The exit code of the crew.

        Raises:
            ConfigError: the keys of this machine are not the server's, at the start or a restart.
        """
        try:
            self._start()
            while True:
                event = self._supervisor.next_event(None)
                if event is SupervisorEvent.STOP:
                    return EXIT_OK
                if isinstance(event, Death) and not self._survives(event):
                    return EXIT_OK
                self._handle(event)
        finally:
            self._supervisor.clean_up()

    def _start(self) -> None:
        """Start every process, once the keys are known to be the server's."""
        self._check_keys()
        for name in self._names:
            self._supervisor.start(name)

    @abstractmethod
    def _handle(self, event: object) -> None:
        """Act on an event of `Supervisor.next_event`: any but STOP, and a death that ended it."""

    @abstractmethod
    def _survives(self, death: Death) -> bool:
        """Start the process that died again, or return False: the crew ends.

        Raises:
            ConfigError: the keys of this machine are not the server's any more.
        """


# --- a replica ------------------------------------------------------------------------------------


class Crew(KeptProcesses):
    """The processes of one replica.

    Args:
        config: the server's flags.
        number: the replica.
        links: flags with the addresses of the links that leave this machine.
        port: where the scheduler receives.
        pages: where the worker gives KV pages to other machines; None: it gives none.
        check_keys: raises ConfigError where this machine has other keys than the server's.
        connection: the crew's end of its control channel.
    """

    def __init__(
        self,
        config: server_config.ServerConfig,
        number: int,
        links: list[str],
        port: ReservedPort,
        pages: ReservedPort | None,
        check_keys: Callable[[], None],
        connection: socket.socket,
    ) -> None:
        names = [f"{program}/{number}" for program in RING]
        flags = [*config.to_argv(), "--scheduler-address", port.address, *links]
        ports = [port]
        if pages is not None:
            flags += ["--pages-address", pages.address]
            ports.append(pages)
        super().__init__(
            names, flags, programs.command_of, config.launch, ports, check_keys, connection
        )
        self._pages_address = "" if pages is None else pages.address
        self._worker, self._scheduler, _ = names
        self._sources = SourcesFile(self._supervisor.run_dir)
        self._has_joined = False

    def _handle(self, event: object) -> None:
        if isinstance(event, ReadyAgain):
            self._control.report("restarted", process=event.name)
        elif event is SupervisorEvent.COMMAND:
            for command, argument in self._control.read_commands():
                self._obey(command, argument)
        if not self._has_joined and not self._supervisor.not_ready:
            self._has_joined = True
            # What the driver reports in its own name, when it is ready.
            info = {k: v for k, v in self._supervisor[self._worker].info.items() if k != "pid"}
            address = self._ports[0].address
            self._control.report(
                "joined", address=address, version=__version__, info=info,
                pages=self._pages_address,
            )  # fmt: skip

    def _obey(self, command: Command, argument: str) -> None:
        if command is Command.ABORT:
            self._supervisor[self._scheduler].send(Command.ABORT, argument)
        elif command is Command.RELOAD:
            self._supervisor[self._worker].stop_for_reload()
        elif command is Command.SOURCES:
            self._sources.update(argument)

    def _survives(self, death: Death) -> bool:
        """Restart a process that died; return False if the replica ends with it."""
        if death.is_clean:
            if self._supervisor.all_exited:
                self._control.report("left")
            return not self._supervisor.all_exited
        if death.restart_delay_s is None:
            self._control.report("lost", reason=f"{death.name} died ({death.reason})")
            return False
        self._check_keys()
        self._control.report("died", process=death.name, reason=death.reason)
        self._supervisor.start_later(death.name, death.restart_delay_s)
        return True


# --- ranks of a replica on a further machine ------------------------------------------------------


class RankCrew(KeptProcesses):
    """The ranks of one machine, which run until the actor ends the crew, or one dies for good.

    Args:
        config: the server's flags.
        number: the replica.
        first: number of its first rank.
        ports: where each of its ranks receives.
        check_keys: raises ConfigError where this machine has other keys than the server's.
        connection: the crew's end of its control channel.
    """

    def __init__(
        self,
        config: server_config.ServerConfig,
        number: int,
        first: int,
        ports: Sequence[ReservedPort],
        check_keys: Callable[[], None],
        connection: socket.socket,
    ) -> None:
        names = [f"{RANK_NAME} {rank}/{number}" for rank in range(first, first + len(ports))]
        # Those of other machines are empty.
        addresses = [""] * first + [port.address for port in ports]
        flags = [*config.to_argv(), "--rank-addresses", ",".join(addresses)]
        super().__init__(names, flags, _command_of, config.launch, ports, check_keys, connection)

    def _start(self) -> None:
        super()._start()
        addresses = [port.address for port in self._ports]
        self._control.report("ranks", addresses=addresses, version=__version__)

    def _handle(self, event: object) -> None:
        if event is SupervisorEvent.COMMAND:
            self._control.read_commands()

    def _survives(self, death: Death) -> bool:
        """Start a rank again; return False if the replica ends with it."""
        delay_s = 0.0 if death.is_clean else death.restart_delay_s
        if delay_s is None:
            self._control.report("lost", reason=f"{death.name} died ({death.reason})")
            return False
        self._check_keys()
        self._supervisor.start_later(death.name, delay_s)
        return True


def _command_of(name: str) -> list[str]:
    """Return the command of a rank, which is named RANK_NAME and its number."""
    return [*programs.command_of(RANK_PROGRAM), name.removeprefix(RANK_NAME).strip()]


# --- the program ----------------------------------------------------------------------------------


def check_inner_key(directory: str, expected: str, host: str) -> None:
    """Raise ConfigError where a directory's inner key is not that of the server.

    Args:
        directory: of the keys; "": the links have none.
        expected: id of the server's inner key.
        host: this machine.
    """
    if inner_key_id(directory) != expected:
        raise errors.ConfigError(
            f"the inner key in {directory} on {host} is another one than the server's: copy the"
            f" server's {directory} to this machine"
        )


def main() -> NoReturn:
    """Run `python -m cluster_proc.crew`: find the model on this machine, keep the processes."""
    arguments = _parser().parse_args()
    continue_at_parents_death()
    connection = socket.socket(fileno=arguments.control_fd)
    allow_open_files(MAX_OPEN_FILES)
    try:
        config = configuration.from_namespace(arguments)
        model = resolve.resolve_model(config.model, show_progress=False)
        model_impl.check_servable(model, config.worker.quantization)
        name = config.model.shown_name
        config = config.replace(**model.location_flags, served_model_name=name)
        code = _crew(arguments, config, connection).run()
    except errors.QuadrigaError as error:
        reason = f"machine {arguments.node_host}: {type(error).__name__}: {error}"
        ControlChannel.report_to(connection, "lost", reason=reason)
        code = EXIT_START_FAILED
    sys.exit(code)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m cluster_proc.crew")
    parser.add_argument("--control-fd", type=int, required=True, help="socket to the actor")
    parser.add_argument("--replica", type=int, required=True, help="number of the replica")
    parser.add_argument("--node-host", required=True, help="address of this machine")
    parser.add_argument("--delivery-address", required=True, help="where the frontend receives")
    parser.add_argument("--inner-key-id", required=True, help="of the inner key at the server")
    parser.add_argument("--rank-addresses", default="", help="of the ranks on other machines")
    parser.add_argument(
        "--first-rank", type=int, default=0, help="keep only ranks, from this one on (0: a replica)"
    )
    configuration.add_flags(parser)
    return parser


def _crew(
    arguments: argparse.Namespace, config: server_config.ServerConfig, connection: socket.socket
) -> KeptProcesses:
    """Return the crew of the arguments, with free ports of this machine."""
    host, first, number = arguments.node_host, arguments.first_rank, arguments.replica
    check_keys = partial(check_inner_key, config.frontend.curve_dir, arguments.inner_key_id, host)
    if first:
        num_ranks = config.replicas.place_of(number).ranks_per_machine(config.worker.tp)
        ports = [ReservedPort(host) for _ in range(num_ranks)]
        return RankCrew(config, number, first, ports, check_keys, connection)
    links = ["--delivery-address", arguments.delivery_address]
    if arguments.rank_addresses:
        links += ["--rank-addresses", arguments.rank_addresses]
    pages = ReservedPort(host) if config.replicas.computes_prompts(number) else None
    return Crew(config, number, links, ReservedPort(host), pages, check_keys, connection)


if __name__ == "__main__":
    main()
