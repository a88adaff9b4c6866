"""A rank crew: keeps the ranks that a replica has on a further machine.

    python -m cluster_proc.rank_crew --first-rank 1 --replica 2 --node-host 10.0.0.8 …

It is the child of an actor, as a crew is. Each rank waits for rank 0, and exits when that has gone
(worker_proc/remote_rank.py): it is started again, for the next rank 0.

| report | fields |
|---|---|
| `ranks` | `addresses` at which the ranks receive, `version` of quadriga |
| `lost` | `reason`: a rank has died for good |
"""

import argparse
import socket
from collections.abc import Callable

from cluster_proc.crew import KeptProcesses, crew_parser, run_crew
from quadriga import __version__, programs
from quadriga.server.config.server_config import ServerConfig
from quadriga.server.processes.supervisor import Death, SupervisorEvent
from quadriga.wire.links import ReservedPort

PROGRAM = "worker_proc.remote_rank"
NAME = "worker_proc rank"


class RankCrew(KeptProcesses):
    """The ranks of one machine, which run until the actor ends the crew, or one dies for good.

    Args:
        config: the server's flags.
        number: the replica.
        addresses: where each rank receives; "" for those of other machines.
        check_keys: raises ConfigError where this machine has other keys than the server's.
        connection: the crew's end of its control channel.
    """

    def __init__(
        self,
        config: ServerConfig,
        number: int,
        addresses: list[str],
        check_keys: Callable[[], None],
        connection: socket.socket,
    ) -> None:
        ranks = [rank for rank, address in enumerate(addresses) if address]
        names = [f"{NAME} {rank}/{number}" for rank in ranks]
        flags = [*config.to_argv(), "--rank-addresses", ",".join(addresses)]
        super().__init__(names, flags, _command_of, config.launch, check_keys, connection)
        self._addresses = [addresses[rank] for rank in ranks]

    def _start(self) -> None:
        super()._start()
        self._control.report("ranks", addresses=self._addresses, version=__version__)

    def _take_in(self, event: object) -> None:
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
    """Return the command of a rank, which is named NAME and its number."""
    return [*programs.command_of(PROGRAM), name.removeprefix(NAME).strip()]


def _keep_ranks(
    arguments: argparse.Namespace,
    config: ServerConfig,
    check_keys: Callable[[], None],
    connection: socket.socket,
) -> int:
    first, tp = arguments.first_rank, config.worker.tp
    num_ranks = tp // (config.replicas.nnodes or 1)
    ports = [ReservedPort(arguments.node_host) for _ in range(num_ranks)]
    addresses = [""] * first + [port.address for port in ports]
    return RankCrew(config, arguments.replica, addresses, check_keys, connection).run()


def main() -> None:
    """Run `python -m cluster_proc.rank_crew`."""
    parser = crew_parser("python -m cluster_proc.rank_crew")
    parser.add_argument("--first-rank", type=int, required=True, help="number of its first rank")
    run_crew(parser.parse_args(), _keep_ranks)


if __name__ == "__main__":
    main()
