"""The launcher's channel to its owner: the program that started the server for itself.

The owner's end is held by quadriga/llm/owned_server.py. Reports go up, one JSON object per line:
`ready` with the endpoint, or `failed` with an error. At the end of the channel the owner has ended,
however that happened, or needs the server no more: the launcher stops at once.
"""

import json
import os
import signal
import socket
import threading
from contextlib import suppress

from quadriga.runtime.parent_death import continue_at_parents_death


class OwnerChannel:
    """The launcher's end of the channel; without an owner every method does nothing.

    Args:
        file_descriptor: the inherited socket; None: the server was started by hand.

    Attributes:
        is_gone: the owner has ended, or needs the server no more.
    """

    def __init__(self, file_descriptor: int | None) -> None:
        self.is_gone = False
        self._socket: socket.socket | None = None
        if file_descriptor is not None:
            self._socket = socket.socket(fileno=file_descriptor)
            self._socket.set_inheritable(False)
            continue_at_parents_death()
            threading.Thread(target=self._wait_for_end, name="owner", daemon=True).start()

    def __bool__(self) -> bool:
        """Whether the server has an owner."""
        return self._socket is not None

    def report_ready(self, endpoint: str) -> None:
        """Report that the server answers at this address."""
        self._report({"report": "ready", "endpoint": endpoint})

    def report_failure(self, code: str, message: str) -> None:
        """Report why the server cannot start; `code` is that of a QuadrigaError."""
        self._report({"report": "failed", "code": code, "message": message})

    def _report(self, report: dict[str, str]) -> None:
        if self._socket is not None:
            with suppress(OSError):  # the owner is gone, which `_wait_for_end` handles
                self._socket.sendall(json.dumps(report).encode() + b"\n")

    def _wait_for_end(self) -> None:
        """Stop the launcher at the end of the channel, also while it fetches a model."""
        assert self._socket is not None
        with suppress(OSError):
            while self._socket.recv(4096):
                pass
        self.is_gone = True
        os.kill(os.getpid(), signal.SIGTERM)
