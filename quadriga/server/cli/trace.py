"""`quadriga trace ID` and `quadriga trace --live 10s`: files for ui.perfetto.dev."""

import argparse
import asyncio
import json
import re
import sys
import time
from contextlib import aclosing
from pathlib import Path
from typing import Any

import msgspec

from quadriga.errors import ConfigError, InvalidRequest
from quadriga.server.cli import live_picture, server_api, shared
from quadriga.server.tracing.chrome import LiveRecording

MAX_LIVE_S = 600.0


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the command."""
    parser.add_argument("id", metavar="ID", nargs="?", help="of an answer, or its X-Request-Id")
    parser.add_argument(
        "--live", type=seconds, metavar="10s", help="record all requests and steps for so long"
    )
    live_picture.add_replica(parser)
    parser.add_argument(
        "-o", "--output", type=Path, metavar="trace.json", help="(default: standard output)"
    )
    shared.add_url(parser)


def seconds(text: str) -> float:
    """Return the seconds of `10s` or `10`."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)s?", text)
    if match is None or not 0 < float(match[1]) <= MAX_LIVE_S:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no time: it must be from 1s to {MAX_LIVE_S:.0f}s, such as 10s"
        )
    return float(match[1])


def run(arguments: argparse.Namespace) -> None:
    """Write the trace of a request, or record the live feed."""
    if (arguments.id is None) == (arguments.live is None):
        raise InvalidRequest("give the ID of a request, or --live 10s for all of them")
    if arguments.live is None:
        trace = server_api.ServerApi(arguments.url, arguments.api_key).trace(arguments.id)
        num_spans = sum(event["ph"] == "X" for event in trace["traceEvents"])
        _write(trace, f"{num_spans} spans", arguments.output)
        return
    recording = asyncio.run(_record(arguments))
    what = f"{recording.num_steps} steps"
    if recording.num_lost:
        what += f", without {recording.num_lost} messages that were lost on the way,"
    _write(msgspec.to_builtins(recording.trace()), what, arguments.output)


async def _record(arguments: argparse.Namespace) -> LiveRecording:
    """Record the live feed for some seconds, counted from its first message."""
    recording, ends_at = LiveRecording(), 0.0
    feed = live_picture.gateway_messages(arguments.url, arguments.api_key, arguments.replica)
    async with aclosing(feed) as messages:
        async for message in messages:
            now = time.monotonic()
            ends_at = ends_at or now + arguments.live
            recording.add(message)
            if now >= ends_at or recording.is_full:
                break
    return recording


def _write(trace: dict[str, Any], what: str, output: Path | None) -> None:
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
    shared.note(f"{what} are in {output}: open it at https://ui.perfetto.dev")
