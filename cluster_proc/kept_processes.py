"""The processes that a crew keeps on its machine, from their start to the crew's end."""

import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from quadriga.config.server_config import LaunchArgs
from quadriga.runtime.control_channel import ControlChannel
from quadriga.runtime.exit_codes import EXIT_OK
from quadriga.supervisor.events import Death, SupervisorEvent
from quadriga.supervisor.supervisor import Supervisor


class KeptProcesses(ABC):
    """Starts the processes of a crew, and keeps them until they end or the actor ends the crew.

    A subclass takes in the events, and decides which deaths the crew survives.

    Args:
        names: names of the processes.
        flags: command line flags of every process.
        program_of: returns the command that runs a process, before its flags.
        launch: limits of restarts and of the watchdog.
        check_keys: raises ConfigError where this machine has other keys than the server's.
        connection: the crew's end of its control channel.
    """

    def __init__(
        self,
        names: Sequence[str],
        flags: list[str],
        program_of: Callable[[str], list[str]],
        launch: LaunchArgs,
        check_keys: Callable[[], None],
        connection: socket.socket,
    ) -> None:
        self._names = names
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
                self._take_in(event)
        finally:
            self._supervisor.clean_up()

    def _start(self) -> None:
        """Start every process, once the keys are known to be the server's."""
        self._check_keys()
        for name in self._names:
            self._supervisor.start(name)

    @abstractmethod
    def _take_in(self, event: object) -> None:
        """Act on an event of `Supervisor.next_event`: any but STOP, and a death that ended it."""

    @abstractmethod
    def _survives(self, death: Death) -> bool:
        """Start the process that died again, or return False: the crew ends.

        Raises:
            ConfigError: the keys of this machine are not the server's any more.
        """
