"""The log of a process: lines of text, or one JSON object a line (--log-format).

A line has its message in both formats. In JSON it may have fields of its own beside it, which a
program can read without taking the message apart.
"""

import json
import logging
import sys
import threading
import traceback
from datetime import datetime, timezone
from types import TracebackType
from typing import Any

from quadriga.runtime.terminal import line_start

JSON = "json"
_FIELDS = "fields"


class JsonFormatter(logging.Formatter):
    """Format a record as one JSON object; docs/logs.md lists the fields.

    Args:
        process: name of this process.
    """

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """Return the object in one line of ASCII; a traceback is a field of it."""
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
        return json.dumps(line, default=str)


def set_up_logging(process: str, level: str, log_format: str) -> None:
    """Log to standard error from this severity on.

    In JSON, warnings of Python and exceptions that end a thread are lines of the log, too.
    """
    handler = logging.StreamHandler(sys.stderr)
    if log_format == JSON:
        handler.setFormatter(JsonFormatter(process))
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
        fields: values that JSON can represent; None stands for an unknown value.
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
