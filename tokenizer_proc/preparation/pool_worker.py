"""Processes that prepare long messages, so that no message holds up the event loop.

The tokenizer process forks a fork server once, before it has threads or sockets and after the
tokenizer is loaded; the fork server forks a worker on demand, in a few milliseconds and with the
tokenizer's pages shared. A worker answers each frame by its outcome: 4 bytes of length (big endian)
before each. It ends when its socket ends, and after a long frame, which gives the memory back.
"""

import gc
import os
import resource
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Callable
from functools import partial

from quadriga.runtime.parent_death import signal_at_parents_death

LENGTH = struct.Struct(">I")
MAX_WORKER_BYTES = 4 << 30
"""Address space of a worker: the longest text (`encode.MAX_TEXT_BYTES`) takes half of it."""
MAX_CPU_S = 60.0
"""CPU time of one frame; the longest text takes 4 s."""
LONG_FRAME_BYTES = 256 * 1024
"""A worker that has prepared a frame of this size is replaced."""

PrepareFrame = Callable[[bytes], bytes]


class ForkServer:
    """The tokenizer process's end of its fork server. Make it before the first thread or socket."""

    def __init__(self, prepare_frame: PrepareFrame) -> None:
        self.socket, theirs = socket.socketpair()
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            _run_forked(theirs, partial(_serve_forks, theirs, prepare_frame))
        theirs.close()

    def fork_worker(self) -> socket.socket:
        """Return the socket of a new worker. Raises OSError where the fork server is gone."""
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self.socket, [b"w"], [theirs.fileno()])
        return ours

    def close(self) -> None:
        """End the fork server and its workers, whatever they are at."""
        self.socket.close()


def _run_forked(keep: socket.socket, main: Callable[[], None]) -> None:
    """Run `main` as all that a forked process does, with no file but `keep` and the standard ones.

    A copy of another socket would hide from the process at its other end that its peer has died.
    """
    try:
        signal_at_parents_death(signal.SIGKILL)
        os.closerange(3, keep.fileno())
        os.closerange(keep.fileno() + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        main()
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def _serve_forks(connection: socket.socket, prepare_frame: PrepareFrame) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # ended workers leave no zombies
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # threads cost memory, and a text needs one

    gc.freeze()
    while True:
        data, descriptors, _, _ = socket.recv_fds(connection, 1, 1)
        if not data:
            return
        worker = socket.socket(fileno=descriptors[0])
        if os.fork() == 0:
            _run_forked(worker, partial(_serve_frames, worker, prepare_frame))
        worker.close()


def _serve_frames(connection: socket.socket, prepare_frame: PrepareFrame) -> None:
    _limit_memory()
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    while (frame := _receive(connection)) is not None:
        signal.setitimer(signal.ITIMER_PROF, MAX_CPU_S)
        outcome = prepare_frame(frame)
        connection.sendall(LENGTH.pack(len(outcome)))
        connection.sendall(outcome)
        if len(frame) >= LONG_FRAME_BYTES:
            return


def _limit_memory() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = MAX_WORKER_BYTES if hard == resource.RLIM_INFINITY else min(MAX_WORKER_BYTES, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _receive(connection: socket.socket) -> bytes | None:
    header = _receive_exactly(connection, LENGTH.size)
    if header is None:
        return None
    return _receive_exactly(connection, LENGTH.unpack(header)[0])


def _receive_exactly(connection: socket.socket, size: int) -> bytes | None:
    data = bytearray(size)
    view = memoryview(data)
    received = 0
    while received < size:
        count = connection.recv_into(view[received:])
        if not count:
            return None
        received += count
    return bytes(data)
