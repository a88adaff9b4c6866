"""A proxy of one TCP port, whose connections a test cuts, stops, slows down and damages."""

import select
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress

CHUNK = 65536


class LinkProxy:
    """Forwards every connection to a port in threads of its own.

    Args:
        target: `tcp://HOST:PORT`.

    Attributes:
        address: where it listens, as `target`.
        bytes_per_s: of each direction; None: no limit.
        is_stopped: nothing passes, and nothing is closed.
        change: is given what passes from the target, and returns what passes on.
        num_bytes: that have passed from the target.
    """

    def __init__(self, target: str) -> None:
        host, port = target.removeprefix("tcp://").rsplit(":", 1)
        self._target = host, int(port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self.bytes_per_s: float | None = None
        self.is_stopped = False
        self.change: Callable[[bytes], bytes] = lambda data: data
        self.num_bytes = 0
        self.seen: list[bytes] | None = None
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """Close all connections. New ones are forwarded again."""
        pairs, self._pairs = self._pairs, []
        for pair in pairs:
            for end in pair:
                with suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
                end.close()

    def close(self) -> None:
        """Close everything."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                try:
                    far = socket.create_connection(self._target)
                except OSError:
                    near.close()
                    continue
                self._pairs.append((near, far))
                for source, sink, is_from_target in ((near, far, False), (far, near, True)):
                    threading.Thread(
                        target=self._copy, args=(source, sink, is_from_target), daemon=True
                    ).start()

    def _copy(self, source: socket.socket, sink: socket.socket, is_from_target: bool) -> None:
        with suppress(OSError, ValueError):
            while True:
                select.select([source], [], [])
                while self.is_stopped:
                    time.sleep(0.01)
                if not (data := source.recv(CHUNK)):
                    break
                if self.bytes_per_s is not None:
                    time.sleep(len(data) / self.bytes_per_s)
                if is_from_target:
                    self.num_bytes += len(data)
                    data = self.change(data)
                    if self.seen is not None:
                        self.seen.append(data)
                sink.sendall(data)
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
