"""What happens to the processes of a server, as `Supervisor.next_event` returns it."""

import enum
from dataclasses import dataclass
from typing import NamedTuple

from quadriga import errors
from quadriga.errors import ServerFailed


class SupervisorEvent(enum.Enum):
    """An event other than a `Death`.

    Attributes:
        RESTARTED: a process that had died runs again, but is not ready yet.
        STOP, RELOAD: the launcher received a signal.
        COMMAND: the descriptor of `watch` is readable.
        TIMEOUT: the timeout of `next_event` is over.
    """

    RESTARTED = enum.auto()
    STOP = enum.auto()
    RELOAD = enum.auto()
    COMMAND = enum.auto()
    TIMEOUT = enum.auto()


@dataclass(frozen=True, slots=True)
class Death:
    """A process exited.

    Attributes:
        name: the process.
        reason: how it ended, in words.
        restart_delay_s: seconds until it may be restarted; None: it must not be.
        is_clean: it had finished its work.
        error_code: `code` of the QuadrigaError that ended it.
    """

    name: str
    reason: str
    restart_delay_s: float | None
    is_clean: bool
    error_code: str = ServerFailed.code

    @property
    def start_error(self) -> str:
        """Why the process could not start; a message for the user comes first."""
        prefix = f"{type(errors.from_code(self.error_code, '')).__name__}: "
        if self.reason.startswith(prefix):
            return f"{self.reason.removeprefix(prefix)} ({self.name} could not start)"
        return f"{self.name} could not start: {self.reason}"


class ReadyAgain(NamedTuple):
    """A process that had died serves again."""

    name: str
