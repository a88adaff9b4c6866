"""The usage log: a line of JSON for each choice that ends, written by a thread of its own."""

import logging
import os
import queue
import threading
from typing import Any

import msgspec

from quadriga.errors import ConfigError
from scheduler_proc.observe.tenant_stats import usage_of
from scheduler_proc.state.request import Request

# Lines that wait for a disk which does not answer; further ones are left out.
MAX_WAITING_LINES = 100_000


class UsageLine(msgspec.Struct):
    """A line of the usage log.

    Attributes:
        time: Unix seconds of the end.
        tenant: name of the tenant, with its user where there is one.
        request: id of the request at the server.
        choice: number of the choice; the prompt counts for choice 0 only.
        tokens_in: prompt tokens.
        cached: prompt tokens that came from the prefix cache.
        tokens_out: generated tokens.
        seconds: from the arrival to the end.
        finish_reason: stop, length, abort or error.
    """

    time: float
    tenant: str
    request: str
    choice: int
    tokens_in: int
    cached: int
    tokens_out: int
    seconds: float
    finish_reason: str


class UsageLog:
    """Append lines to a file. A disk that is full or fails ends the log, not the serving.

    Raises:
        ConfigError: the file cannot be opened.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._waiting: queue.SimpleQueue[UsageLine | None] = queue.SimpleQueue()
        self._has_failed = False
        self._num_left_out = 0
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK
            self._file = os.open(path, flags, 0o600)  # a FIFO without a reader is refused
            os.set_blocking(self._file, True)
        except OSError as error:
            raise ConfigError(f"--usage-log {path} cannot be written: {error.strerror}") from None
        self._thread = threading.Thread(target=self._write, name="usage log", daemon=True)
        self._thread.start()

    def on_finish(self, request: Request, now: float) -> None:
        """Log a request that has ended. `now`: Unix time in seconds."""
        if self._has_failed:
            return
        if self._waiting.qsize() >= MAX_WAITING_LINES:
            if not self._num_left_out:
                logging.error("the usage log %s leaves lines out: its disk is slow", self._path)
            self._num_left_out += 1
            return
        assert request.finish_reason is not None
        prompt, cached, generated = usage_of(request)
        line = UsageLine(
            round(now, 3),
            request.tenant,
            request.request_id,
            request.index,
            prompt,
            cached,
            generated,
            round(now - request.received_at, 3),
            request.finish_reason.value,
        )
        self._waiting.put(line)

    def close(self) -> None:
        """Write what waits, and end the log."""
        self._waiting.put(None)
        self._thread.join()

    def _write(self) -> None:
        """Write lines as they come, all that wait at once."""
        encode = msgspec.json.Encoder().encode
        is_open = True
        while is_open:
            lines: list[Any] = [self._waiting.get()]
            while not self._waiting.empty():
                lines.append(self._waiting.get())
            is_open = lines[-1] is not None
            data = b"".join(encode(line) + b"\n" for line in lines if line is not None)
            try:
                while data:
                    data = data[os.write(self._file, data) :]
            except OSError as error:
                self._has_failed = True
                logging.error(
                    "the usage log %s ends: %s; restart the server to go on with it",
                    self._path,
                    error.strerror,
                )
                is_open = False
        os.close(self._file)
