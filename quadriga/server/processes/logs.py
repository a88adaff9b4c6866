"""The log of a process: lines of text, or one JSON object a line (--log-format).

In order: the terminal and its status line, the log, the launcher's own lines, and the parts that
lines of the request log have in common.
"""

import codecs
import contextlib
import json
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timezone
from types import TracebackType
from typing import Any

from quadriga.server.config.server_config import LaunchArgs

# The status line ends with the cursor at its start. A log line clears it first; it appears again
# with its next change.

CLEAR = "\r\x1b[K"
STDERR_FD = 2


def is_foreground() -> bool:
    """Return whether standard error is a terminal and this process runs in its foreground."""
    if not sys.stderr.isatty() or os.environ.get("TERM") == "dumb":
        return False
    try:
        return os.tcgetpgrp(sys.stderr.fileno()) == os.getpgrp()
    except OSError:
        return False


def open_if_closed() -> None:
    """Open standard error on /dev/null if this process was started without it.

    Descriptor 2 would otherwise become that of some socket.
    """
    if sys.stderr is None:
        while (fd := os.open(os.devnull, os.O_RDWR)) < STDERR_FD:
            pass
        if fd > STDERR_FD:
            os.close(fd)
        os.set_inheritable(STDERR_FD, True)
        sys.stderr = open(STDERR_FD, "w", closefd=False)  # noqa: SIM115


def drop_unwritten() -> None:
    """Discard what could not be written to standard error, on a full disk or a closed pipe.

    Python would flush it again at exit, and change the exit code when that fails.
    """
    try:
        sys.stderr.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), STDERR_FD)


def line_start() -> str:
    """Return the prefix of a line on standard error; it clears the status line."""
    return CLEAR if sys.stderr.isatty() else ""


class TransientLine:
    """The status line. A terminal that accepts no output, as after Ctrl-S, blocks nothing."""

    def __init__(self, terminal: str) -> None:
        # A separate open file: O_NONBLOCK would otherwise apply to every user of the terminal.
        self._fd = os.open(terminal, os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)

    def show(self, text: str) -> None:
        """Replace the line's text, cut off at the terminal's width."""
        try:
            width = os.get_terminal_size(self._fd).columns
            cut = text[: width - 1] if width else text
            os.write(self._fd, f"\r{cut}\x1b[K\r".encode())
        except OSError:
            return

    def close(self) -> None:
        """Clear the line."""
        self.show("")
        os.close(self._fd)


# A line has its message in both formats. In JSON it may have fields of its own beside it, which a
# program can read without taking the message apart.

JSON = "json"
_FIELDS = "fields"


class JsonFormatter(logging.Formatter):
    """Format a record as one JSON object; docs/monitor.md lists the fields.

    Args:
        process: name of this process.
        has_unicode: the output can have any character.
    """

    def __init__(self, process: str, has_unicode: bool = True) -> None:
        super().__init__()
        self._process = process
        self._has_unicode = has_unicode

    def format(self, record: logging.LogRecord) -> str:
        """Return the object in one line, of printable text; a traceback is a field of it."""
        time = datetime.fromtimestamp(record.created, timezone.utc).isoformat(
            timespec="milliseconds"
        )
        line = {
            "time": time.replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "process": self._process,
            "message": record.getMessage(),
            **getattr(record, _FIELDS, {}),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        text = json.dumps(line, default=str, ensure_ascii=not self._has_unicode)
        return text if text.isprintable() else _escaped(text)


def _escaped(text: str) -> str:
    """Return JSON in which characters that a terminal would not show are written by number."""
    return "".join(c if c.isprintable() else json.dumps(c)[1:-1] for c in text)


def set_up_logging(process: str, level: str, log_format: str) -> None:
    """Log to standard error from this severity on.

    In JSON, warnings of Python and exceptions that end a thread are lines of the log, too.
    """
    handler = logging.StreamHandler(sys.stderr)
    if log_format == JSON:
        has_unicode = codecs.lookup(sys.stderr.encoding).name == "utf-8"
        handler.setFormatter(JsonFormatter(process, has_unicode))
        logging.captureWarnings(True)
        sys.excepthook = _log_uncaught
        threading.excepthook = _log_end_of_thread
    else:
        text = f"{line_start()}%(asctime)s {process} %(levelname)s %(message)s"
        handler.setFormatter(logging.Formatter(text, "%H:%M:%S"))
    logging.basicConfig(level=level.upper(), handlers=[handler])


def is_json() -> bool:
    """Return whether this process logs JSON."""
    return any(isinstance(handler.formatter, JsonFormatter) for handler in logging.root.handlers)


def log_fields(level: int, message: str, **fields: Any) -> None:
    """Log a message that has fields of its own in JSON.

    Args:
        level: a severity of the logging module.
        message: the line in text.
        fields: values that JSON can represent; None is an unknown value.
    """
    logging.log(level, "%s", message, extra={_FIELDS: fields})


def log_exception() -> None:
    """Log the traceback of the exception that is being handled: as it is, or as a JSON field."""
    if is_json():
        logging.exception("uncaught exception")
    else:
        traceback.print_exc()


def _log_uncaught(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    logging.critical("uncaught exception", exc_info=(kind, error, trace))


def _log_end_of_thread(end: threading.ExceptHookArgs) -> None:
    if end.exc_value is not None:
        name = end.thread.name if end.thread else "unknown"
        info = (end.exc_type, end.exc_value, end.exc_traceback)
        logging.critical("uncaught exception in thread %s", name, exc_info=info)


def say(text: str, **fields: Any) -> None:
    """Print a line on standard error; a full disk or a closed pipe must not end the server.

    Off a terminal it has the time, process and severity of the other processes' log lines.

    Args:
        text: the line; an error begins with `error: `.
        fields: what the line has beside its message in JSON.
    """
    if is_json():
        level = logging.ERROR if text.startswith("error: ") else logging.INFO
        log_fields(level, text.removeprefix("error: ").strip(), **fields)
        return
    with contextlib.suppress(OSError):
        if not sys.stderr.isatty():
            severity = "ERROR" if text.startswith("error: ") else "INFO"
            text = f"{time.strftime('%H:%M:%S')} launcher {severity} {text.removeprefix('error: ')}"
        print(f"{line_start()}{text}", file=sys.stderr, flush=True)


# A line of the request log has ids, the outcome, token counts and times; never token ids or keys,
# and text of a client only where the reason of a refusal quotes it.

# Longest part of a line that a client can choose, such as the path.
MAX_LOGGED_CHARS = 120
# A reason quotes limits and remedies beside what the client sent.
MAX_REASON_CHARS = 300


@dataclass(frozen=True, slots=True)
class RequestLogLevel:
    """Which requests are logged.

    Attributes:
        logs_all: every request.
        slow_s: seconds from which a request is logged as slow, with its stages; None: never.
        is_json: the log is JSON, which has the scheduler's part of requests by HTTP, too.
    """

    logs_all: bool = False
    slow_s: float | None = None
    is_json: bool = False

    @classmethod
    def of(cls, args: LaunchArgs) -> "RequestLogLevel":
        """Return what the flags ask for."""
        logs_all = args.log_requests or args.log_level == "debug"
        return cls(logs_all, args.log_slow_requests, args.log_format == JSON)

    @property
    def is_off(self) -> bool:
        """Whether no request is logged."""
        return not self.logs_all and self.slow_s is None

    def is_slow(self, seconds: float) -> bool:
        """Return whether a request of this duration is slow."""
        return self.slow_s is not None and seconds >= self.slow_s


def in_a_line(text: str, max_chars: int = MAX_LOGGED_CHARS) -> str:
    """Return a client's text shortened and without line breaks and control characters."""
    return repr(text[:max_chars])[1:-1]


def token_counts(num_prompt: int, num_cached: int, num_generated: int) -> list[str]:
    """Return the parts of a line with the numbers of tokens."""
    return [f"prompt {num_prompt} tokens, {num_cached} cached", f"generated {num_generated}"]


def first_token_times(queued_s: float, first_token_s: float) -> list[str]:
    """Return the parts of a line with the seconds in the queue and to the first token."""
    return [f"queued {max(0.0, queued_s):.3f} s", f"first token {first_token_s:.3f} s"]


def seconds_of(stages: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Return the seconds of each stage, as the JSON log has them."""
    return {name: round(max(0.0, seconds), 6) for name, seconds in stages}


def stages_text(stages: Iterable[tuple[str, float]]) -> str:
    """Return the part of a slow request's line with the seconds that it spent in each stage."""
    return "stages: " + ", ".join(f"{name} {max(0.0, s):.3f} s" for name, s in stages)
