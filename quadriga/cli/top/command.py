"""`quadriga top`: requests, lanes, gauges and processes of a server, as they change.

On a terminal it fills the screen until q is pressed. Otherwise it prints plain frames, so that it
can be piped; --once prints one and ends, --json prints the messages themselves.
"""

import argparse
import asyncio
import json
import os
import shutil
import sys
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from typing import Any

import msgspec

from quadriga.cli.flags import add_server
from quadriga.cli.top.feeds import add_replica, gateway_messages, ring_messages
from quadriga.cli.top.picture import Picture
from quadriga.cli.top.screen import Style, screen
from quadriga.cli.top.terminal import FullScreen, full_screen, read_key
from quadriga.client.live.as_json import server_to_json, step_to_json
from quadriga.errors import ConfigError
from quadriga.wire.messages.live import LiveMessage, LiveServer, LiveStep

NAME = "top"
HELP = "show what a server does now: requests, lanes, gauges and processes"
MIN_INTERVAL_S, MAX_INTERVAL_S = 0.05, 60.0
PIPE_SIZE = (160, 60)  # columns and lines of a frame that goes to no terminal


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the command."""
    add_server(parser)
    parser.add_argument(
        "--api-key",
        default=os.environ.get("QUADRIGA_API_KEY", ""),
        metavar="KEY",
        help="for an endpoint http://… that needs one (default: QUADRIGA_API_KEY)",
    )
    add_replica(parser)
    parser.add_argument("--once", action="store_true", help="print one frame and end")
    parser.add_argument("--json", action="store_true", help="print each message as a line of JSON")
    parser.add_argument(
        "--interval", type=float, default=0.25, metavar="S", help="seconds between two frames"
    )


def run(arguments: argparse.Namespace) -> None:
    """Show a server until the user leaves."""
    interval: float = arguments.interval
    if not MIN_INTERVAL_S <= interval <= MAX_INTERVAL_S:
        raise ConfigError(
            f"--interval is {interval:g}: {MIN_INTERVAL_S:g} to {MAX_INTERVAL_S:g} s are allowed"
        )
    asyncio.run(_run(arguments))


async def _run(arguments: argparse.Namespace) -> None:
    async with aclosing(_messages(arguments)) as messages:
        if arguments.json:
            await _print_json(messages, arguments.once)
        elif arguments.once:
            picture = await _whole_picture(messages)
            _print_frame(picture, arguments.endpoint)
        else:
            await _Show(arguments.endpoint, arguments.interval).run(messages)


def _messages(arguments: argparse.Namespace) -> AsyncGenerator[LiveMessage, None]:
    if arguments.endpoint.startswith(("http://", "https://")):
        return gateway_messages(arguments.endpoint, arguments.api_key, arguments.replica)
    return ring_messages(arguments.endpoint, arguments.curve_dir, arguments.replica)


# --- without a terminal ---------------------------------------------------------------------------


async def _print_json(messages: AsyncGenerator[LiveMessage, None], once: bool) -> None:
    """Print messages; with `once`, until all requests and the processes were in one."""
    has_whole = has_server = False
    async for message in messages:
        print(json.dumps(message_to_json(message)), flush=True)
        has_whole = has_whole or (isinstance(message, LiveStep) and message.is_whole)
        has_server = has_server or isinstance(message, LiveServer)
        if once and has_whole and has_server:
            return


def message_to_json(message: LiveMessage) -> dict[str, Any]:
    """Return a message as the object of its line."""
    if isinstance(message, LiveStep):
        kind, fields = "step", step_to_json(message)
    else:
        kind, fields = "server", server_to_json(message)
    return {"type": kind, **msgspec.to_builtins(fields)}


async def _whole_picture(messages: AsyncGenerator[LiveMessage, None]) -> Picture:
    """Return a picture with all requests, and the CPU time that the processes use."""
    picture, num_reports = Picture(), 0
    async for message in messages:
        picture.take(message)
        num_reports += isinstance(message, LiveServer)
        if picture.is_complete and num_reports > 1:
            break
    return picture


def _print_frame(picture: Picture, endpoint: str) -> None:
    width, height = shutil.get_terminal_size(PIPE_SIZE) if sys.stdout.isatty() else PIPE_SIZE
    has_color = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    print("\n".join(screen(picture, endpoint, Style(width, height, has_color))), flush=True)


# --- on a terminal --------------------------------------------------------------------------------


class _Show:
    """Draw a frame at each interval, until q is pressed. p stops the picture, and lets it go on."""

    def __init__(self, endpoint: str, interval_s: float) -> None:
        self._endpoint = endpoint
        self._interval_s = interval_s
        self._picture = Picture()
        self._is_paused = False
        self._leaving = asyncio.Event()

    async def run(self, messages: AsyncGenerator[LiveMessage, None]) -> None:
        """Show the messages."""
        reading = asyncio.create_task(self._read(messages))
        reading.add_done_callback(lambda _: self._leaving.set())
        try:
            if sys.stdout.isatty():
                with full_screen(sys.stdout) as terminal:
                    await self._draw_on(terminal)
            else:
                await self._print_frames()
        finally:
            reading.cancel()
            await asyncio.wait([reading])
        if not reading.cancelled() and (error := reading.exception()) is not None:
            raise error

    async def _read(self, messages: AsyncGenerator[LiveMessage, None]) -> None:
        async for message in messages:
            if not self._is_paused:
                self._picture.take(message)

    async def _draw_on(self, terminal: FullScreen) -> None:
        loop = asyncio.get_running_loop()
        if sys.stdin.isatty():
            loop.add_reader(sys.stdin.fileno(), self._on_key)
        try:
            while not self._leaving.is_set():
                width, height = shutil.get_terminal_size()
                style = Style(width, height, "NO_COLOR" not in os.environ)
                terminal.draw(screen(self._picture, self._endpoint, style, self._is_paused))
                await self._pause()
        finally:
            if sys.stdin.isatty():
                loop.remove_reader(sys.stdin.fileno())

    async def _print_frames(self) -> None:
        while not self._leaving.is_set():
            if self._picture.is_complete:
                _print_frame(self._picture, self._endpoint)
                print(flush=True)
            await self._pause()

    async def _pause(self) -> None:
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._leaving.wait(), self._interval_s)

    def _on_key(self) -> None:
        key = read_key()
        if key in ("q", "Q", ""):
            self._leaving.set()
        elif key in ("p", "P", " "):
            self._is_paused = not self._is_paused
