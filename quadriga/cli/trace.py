"""`quadriga trace ID`: one request's way through the server, for ui.perfetto.dev."""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from quadriga.cli.notes import note
from quadriga.cli.server_api import ServerApi
from quadriga.errors import ConfigError

NAME = "trace"
HELP = "the trace of a request, as a file for ui.perfetto.dev; see docs/observability.md"
DEFAULT_URL = "http://127.0.0.1:8000"


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the command."""
    parser.add_argument("id", metavar="ID", help="of an answer, or its X-Request-Id")
    parser.add_argument(
        "-o", "--output", type=Path, metavar="trace.json", help="(default: standard output)"
    )
    parser.add_argument("--url", default=DEFAULT_URL, help=f"the server (default: {DEFAULT_URL})")
    parser.add_argument(
        "--api-key",
        default=os.environ.get("QUADRIGA_API_KEY", ""),
        metavar="KEY",
        help="if the server needs one (default: the environment variable QUADRIGA_API_KEY)",
    )


def run(arguments: argparse.Namespace) -> None:
    """Write the trace of a request."""
    trace = ServerApi(arguments.url, arguments.api_key).trace(arguments.id)
    write_trace(trace, arguments.output)


def write_trace(trace: dict[str, Any], output: Path | None) -> None:
    """Write a trace to a file, or to standard output for None.

    Raises:
        ConfigError: the file cannot be written.
    """
    text = json.dumps(trace)
    if output is None:
        sys.stdout.write(text + "\n")
        return
    try:
        output.write_text(text)
    except OSError as error:
        raise ConfigError(f"{output} cannot be written: {error.strerror}") from None
    num_spans = sum(event["ph"] == "X" for event in trace["traceEvents"])
    note(f"{num_spans} spans are in {output}: open it at https://ui.perfetto.dev")
