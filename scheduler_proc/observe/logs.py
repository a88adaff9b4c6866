"""The lines that the scheduler writes: of requests, of usage, and of the throughput.

`RequestLog` and `UsageLog` write a line for each choice that ends; the live line of a terminal
(`status_line`) or, without one, the throughput line of the log (`StatsLog`) show the present load.
"""

import logging
import os
import queue
import sys
import threading
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import msgspec

from quadriga.errors import ConfigError
from quadriga.server.processes.logs import (
    MAX_REASON_CHARS,
    RequestLogLevel,
    TransientLine,
    first_token_times,
    in_a_line,
    log_fields,
    seconds_of,
    stages_text,
    token_counts,
)
from quadriga.wire.client import InfoValues, is_gateway, short_address
from scheduler_proc.observe.stats import stage_seconds, usage_of
from scheduler_proc.state.request import Request

# The request log of the ring: one line for each choice at its end.
#
# The gateway logs its own requests. In JSON the scheduler's part of them is a line, too.


class RequestLog:
    """Log requests at their end, all of them or the slow ones."""

    def __init__(self, level: RequestLogLevel) -> None:
        self._level = level

    def on_finish(self, request: Request, now: float) -> None:
        """Log a request that has ended, if it is to be logged. `now`: Unix time in seconds."""
        if is_gateway(request.client) and not self._level.is_json:
            return
        seconds = now - request.received_at
        if self._level.is_slow(seconds):
            stages = stages_text(stage_seconds(request, now))
            text = f"slow: {_line(request, seconds)} · {stages}"
            log_fields(logging.WARNING, text, **_fields(request, now))
        elif self._level.logs_all:
            log_fields(logging.INFO, _line(request, seconds), **_fields(request, now))


def _fields(request: Request, now: float) -> dict[str, Any]:
    """Return the fields of a line in JSON, as docs/monitor.md lists them."""
    assert request.finish_reason is not None
    error, first_at = request.error, request.first_token_at
    return {
        "event": "scheduled" if is_gateway(request.client) else "request",
        "request_id": request.request_id,
        "client": short_address(request.client),
        "choice": request.index,
        "finish_reason": request.finish_reason.value,
        "seconds": round(now - request.received_at, 6),
        "prompt_tokens": request.num_prompt,
        "cached_tokens": request.cached_tokens,
        "generated_tokens": request.num_generated,
        "first_token_s": round(first_at - request.received_at, 6) if first_at else None,
        "stages_s": seconds_of(stage_seconds(request, now)),
        "waited_for": list(request.waited_for),
        "retractions": request.num_retractions,
        "priority": request.priority,
        "adapter": "" if request.adapter is None else request.adapter.name,
        "code": None if error is None else error.code,
        "error": None if error is None else error.message[:MAX_REASON_CHARS],
    }


def _line(request: Request, seconds: float) -> str:
    assert request.finish_reason is not None
    parts = [in_a_line(request.request_id), f"client {short_address(request.client)}"]
    if request.sampling.params.n > 1:
        parts.append(f"choice {request.index}")
    parts += [request.finish_reason.value, f"{seconds:.3f} s"]
    parts += token_counts(request.num_prompt, request.cached_tokens, request.num_generated)
    if request.first_token_at:
        parts += first_token_times(
            request.admitted_at - request.tokenized_at, request.first_token_at - request.received_at
        )
    if request.error is not None:
        reason = in_a_line(request.error.message, MAX_REASON_CHARS)
        parts.append(f"{request.error.code}: {reason}")
    return " · ".join(parts)


# The usage log: a line of JSON for each choice that ends, written by a thread of its own.

# Lines that wait for a disk which does not answer; further ones are left out.
MAX_WAITING_LINES = 100_000
USAGE_RETRY_S = 10.0  # between two attempts on a disk that fails


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
    """Append lines to a file, and to a new one once the file was renamed or removed.

    So a rotation needs no signal. While the disk is full or fails, lines wait, at most
    MAX_WAITING_LINES of them, and the serving goes on.

    Raises:
        ConfigError: the file cannot be opened.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._waiting: queue.SimpleQueue[UsageLine | None] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._has_failed = False
        self._is_stranded = False
        self._num_left_out = 0
        try:
            self._file = _open_to_append(path)
        except OSError as error:
            raise ConfigError(f"--usage-log {path} cannot be written: {error.strerror}") from None
        self._thread = threading.Thread(target=self._write, name="usage log", daemon=True)
        self._thread.start()

    def on_finish(self, request: Request, now: float) -> None:
        """Log a request that has ended. `now`: Unix time in seconds."""
        if self._waiting.qsize() >= MAX_WAITING_LINES:
            if not self._num_left_out:
                logging.error("the usage log %s leaves lines out: its disk is too slow", self._path)
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
        self._closing.set()
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
            self._append(b"".join(encode(line) + b"\n" for line in lines if line is not None))
        os.close(self._file)

    def _append(self, data: bytes) -> None:
        """Write lines, as often as it takes; give up where the log is to end."""
        begin = 0  # of what is not written
        while begin < len(data):
            if self._reopen():
                begin = data.rfind(b"\n", 0, begin) + 1  # whole lines in the new file
            try:
                begin += os.write(self._file, data[begin:])
            except OSError as error:
                self._report(error)
                if self._closing.wait(USAGE_RETRY_S):
                    lines = data.count(b"\n", begin)
                    logging.error("the usage log %s ends without %d lines", self._path, lines)
                    return
            else:
                self._report(None)

    def _reopen(self) -> bool:
        """Open the file anew if its path leads elsewhere; return whether it did.

        Where that is impossible, lines go on into the file that was renamed.
        """
        try:
            if os.path.samestat(os.stat(self._path), os.fstat(self._file)):
                return False
        except OSError:  # renamed or removed
            pass
        try:
            file = _open_to_append(self._path)
        except OSError as error:
            if not self._is_stranded:
                logging.error(
                    "the usage log %s was renamed, and cannot be made anew: %s; lines go on into"
                    " the renamed file",
                    self._path,
                    error.strerror,
                )
            self._is_stranded = True
            return False
        os.close(self._file)
        self._file, self._is_stranded = file, False
        return True

    def _report(self, error: OSError | None) -> None:
        """Log the first failure, and the first success after it."""
        if error is not None and not self._has_failed:
            logging.error(
                "the usage log %s cannot be written: %s; lines wait for room, %d at most",
                self._path,
                error.strerror,
                MAX_WAITING_LINES,
            )
        elif error is None and self._has_failed:
            logging.warning("the usage log %s is written again", self._path)
        self._has_failed = error is not None


def _open_to_append(path: str) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK
    file = os.open(path, flags, 0o600)  # a FIFO without a reader is refused
    os.set_blocking(file, True)
    return file


# The live status line: what the server does, at most once a second, and only when it changed.

INTERVAL_S = 1.0  # shortest time between two lines


class StatusValues(NamedTuple):
    """The numbers from which a line is made: requests, pages and tokens."""

    running: int = 0
    waiting: int = 0
    held: int = 0
    generated: int = 0
    prompted: int = 0
    cached: int = 0


class StatusLine(Protocol):
    """Something that shows what the server does."""

    @property
    def wake_at(self) -> float | None:
        """When `update` must be called even if nothing happens; None for never."""

    def update(self, now: float) -> None:
        """Show what has changed. The scheduler calls it after each of its steps."""

    def close(self) -> None:
        """Show nothing any more."""


class TerminalStatusLine:
    """A status line on a terminal.

    Args:
        show: replaces its text.
        erase: erases it for good.
        info: returns gauges and counters, as docs/protocol.md lists them.
    """

    def __init__(
        self, show: Callable[[str], None], erase: Callable[[], None], info: Callable[[], InfoValues]
    ) -> None:
        self.wake_at: float | None = None
        self.close = erase
        self._show = show
        self._info = info
        self._values = StatusValues()
        self._shown_at = 0.0
        self._tokens_per_s = 0.0
        self._hit_share = 0.0

    def update(self, now: float) -> None:
        """Show what has changed, at the earliest INTERVAL_S after the last line."""
        next_at = self._shown_at + INTERVAL_S
        if now < next_at:
            self.wake_at = next_at
            return
        info: dict[str, Any] = self._info()
        values = status_values(info)
        if values == self._values and self._tokens_per_s == 0:
            self.wake_at = None
            return
        self._observe(values, now)
        self._show(self._text(info))
        self.wake_at = now + INTERVAL_S

    def _observe(self, values: StatusValues, now: float) -> None:
        seconds = now - self._shown_at
        self._tokens_per_s = (values.generated - self._values.generated) / seconds
        prompted = values.prompted - self._values.prompted
        if prompted > 0:
            self._hit_share = (values.cached - self._values.cached) / prompted
        self._values, self._shown_at = values, now

    def _text(self, info: dict[str, Any]) -> str:
        values, hits = self._values, 100 * self._hit_share
        held = 100 * values.held / max(1, info.get("pages_total", 0))
        return (
            f"{values.running} running · {values.waiting} waiting ·"
            f" {self._tokens_per_s:.0f} tok/s · KV {held:.0f} % · hits {hits:.0f} %"
        )


def status_values(info: dict[str, Any]) -> StatusValues:
    """Return the numbers of a line from gauges and counters of the scheduler."""
    return StatusValues(
        info["running"],
        info["waiting"],
        info.get("pages_held", 0),
        info["generation_tokens_total"],
        info["prompt_tokens_total"],
        info["cached_tokens_total"],
    )


class NoStatusLine:
    """A status line that is not shown."""

    wake_at: float | None = None

    def update(self, now: float) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


def status_line(wanted: bool, info: Callable[[], InfoValues]) -> StatusLine:
    """Return the status line of this process. wanted: unless stderr is not a terminal."""
    if not wanted or not sys.stderr.isatty():
        return NoStatusLine()
    try:
        line = TransientLine(os.ttyname(sys.stderr.fileno()))
    except OSError:  # the terminal is another user's, or has no name in this container
        return NoStatusLine()
    return TerminalStatusLine(line.show, line.close, info)


# The throughput line of the log, every --log-stats-interval seconds while there is work.


class StatsLog:
    """Log throughput and load. The scheduler calls `update` after each of its steps.

    A line comes at the end of each interval that began with work. An idle server logs nothing.

    Args:
        interval_s: seconds that a line covers.
        info: returns gauges and counters, as docs/protocol.md lists them.

    Attributes:
        wake_at: when `update` must be called even if nothing happens; None for never.
    """

    def __init__(self, interval_s: float, info: Callable[[], InfoValues]) -> None:
        self.wake_at: float | None = None
        self._interval_s = interval_s
        self._info = info
        self._began_at = 0.0
        # At the begin of the interval, or, before it, when the server was last seen idle.
        self._values = StatusValues()

    def update(self, now: float) -> None:
        """Begin an interval if there is work and none is open, or log a line at its end."""
        if self.wake_at is not None and now < self.wake_at:
            return
        info: dict[str, Any] = self._info()
        values = status_values(info)
        if self.wake_at is not None:
            self._log(values, info, now - self._began_at)
        has_work = bool(values.running or values.waiting)
        self.wake_at = now + self._interval_s if has_work else None
        self._began_at, self._values = now, values

    def _log(self, values: StatusValues, info: dict[str, Any], seconds: float) -> None:
        prompted = values.prompted - self._values.prompted
        generated = values.generated - self._values.generated
        kv_share = values.held / max(1, info.get("pages_total", 0))
        hit_share = (values.cached - self._values.cached) / max(1, prompted)
        text = (
            f"{values.running} running · {values.waiting} waiting"
            f" · prompt {prompted / seconds:.0f} tok/s"
            f" · generated {generated / seconds:.0f} tok/s"
            f" · KV {100 * kv_share:.0f} %"
            f" · hits {100 * hit_share:.0f} %"
        )
        log_fields(
            logging.INFO,
            text,
            event="throughput",
            running=values.running,
            waiting=values.waiting,
            prompt_tokens_per_s=round(prompted / seconds, 3),
            generated_tokens_per_s=round(generated / seconds, 3),
            kv_share=round(kv_share, 4),
            hit_share=round(hit_share, 4),
        )

    def close(self) -> None:
        """Do nothing: there is nothing to erase."""
