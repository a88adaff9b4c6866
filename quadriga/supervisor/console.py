"""The launcher's own lines on standard error."""

import contextlib
import logging
import sys
import time
from typing import Any

from quadriga.runtime.logs import is_json, log_fields
from quadriga.runtime.terminal import line_start


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
