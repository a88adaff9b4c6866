"""The processes that prepare long messages, so that no message holds up the event loop.

The tokenizer process forks a fork server once, after the tokenizer is loaded and before it has
threads or sockets. The fork server forks a worker on demand, in a few milliseconds, sharing the
tokenizer's pages. A worker answers each frame with its outcome; before both go 4 bytes of length
(big endian). It ends with its socket, and after a long frame, which returns the memory.
"""

import gc
import os
import resource
import signal
import socket
import struct
import sys
from collections.abc import Callable
from functools import partial
from typing import BinaryIO

from quadriga.runtime.logs import log_exception
from quadriga.runtime.parent_death import signal_at_parents_death

LENGTH = struct.Struct(">I")
# This is address space; the longest text (`encode.MAX_TEXT_BYTES`) takes half of it.
MAX_WORKER_BYTES = 4 << 30
# This holds for one frame; the longest text takes 4 s.
MAX_CPU_S = 60.0
# A worker that has prepared a frame of this size is replaced.
LONG_FRAME_BYTES = 256 * 1024

PrepareFrame = Callable[[bytes], bytes]


class ForkServer:
    """The tokenizer process's end of its fork server; made before the first thread or socket."""

    def __init__(self, prepare_frame: PrepareFrame) -> None:
        self.socket, child_end = socket.socketpair()
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            _run_forked(child_end, partial(_serve_forks, child_end, prepare_frame))
        child_end.close()

    def fork_worker(self) -> socket.socket:
        """Return the socket to a new worker. Raise OSError if the fork server is gone."""
        own_end, worker_end = socket.socketpair()
        with worker_end:
            socket.send_fds(self.socket, [b"w"], [worker_end.fileno()])
        return own_end

    def close(self) -> None:
        """End the fork server."""
        self.socket.close()


def _run_forked(keep: socket.socket, main: Callable[[], None]) -> None:
    """Run `main` and end the process. All files but `keep` and the standard ones are closed.

    A process at the other end of an inherited socket would not notice that its peer has died.
    """
    try:
        signal_at_parents_death(signal.SIGKILL)
        os.closerange(3, keep.fileno())
        os.closerange(keep.fileno() + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        main()
        os._exit(0)
    except BaseException:
        log_exception()
        os._exit(1)


def _serve_forks(connection: socket.socket, prepare_frame: PrepareFrame) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # ended workers leave no zombies
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # threads cost memory, and one text needs none
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
    received = connection.makefile("rb")
    while (frame := _receive(received)) is not None:
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


def _receive(received: BinaryIO) -> bytes | None:
    header = received.read(LENGTH.size)
    if len(header) < LENGTH.size:
        return None
    (length,) = LENGTH.unpack(header)
    frame = received.read(length)
    return frame if len(frame) == length else None
