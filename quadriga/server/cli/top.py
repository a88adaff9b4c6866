"""`quadriga top`: requests, lanes, gauges and processes of a server, as they change.

In order: the lines, for a terminal or a file, the full-screen terminal, and the command.
live_picture.py collects what is shown.
"""

import argparse
import asyncio
import json
import os
import shutil
import signal
import sys
import termios
import time
import tty
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass
from types import FrameType
from typing import Any, TextIO

import msgspec

from quadriga.client.live import server_to_json, step_to_json
from quadriga.errors import ConfigError
from quadriga.server.cli.live_picture import (
    NO_CELL,
    Picture,
    RequestRow,
    add_replica,
    gateway_messages,
    ring_messages,
)
from quadriga.server.cli.shared import add_server, is_web_address
from quadriga.wire.live import LiveMessage, LiveServer, LiveStep

# 256-colour numbers of the cells of a lane.
COLORS = {"d": 35, "P": 33, "p": 75, "r": 141, ".": 240, "x": 196}
LEGEND = (("d", "decode"), ("P", "prefill"), ("p", "chunk"), ("r", "again"), (".", "waits"),
          ("x", "retracted"))  # fmt: skip
BLOCK = "■"
MIN_LANE = 10
BAR_WIDTH = 24
NUM_EVENTS = 5
MAX_MODEL_LINES = 3
ID_CHARS = 12
COLUMNS = f"{'REQUEST':<{ID_CHARS}} {'PROMPT':>7} {'CACHED':>7} {'OUT':>6} {'AGE':>7}  {'DOES':<17}"
MEBIBYTE = 1 << 20


@dataclass(frozen=True, slots=True)
class Style:
    """How lines are shown. has_color: with ANSI colours, blocks in place of letters in lanes."""

    width: int
    height: int
    has_color: bool

    def paint(self, text: str, color: int | None = None, bold: bool = False) -> str:
        """Return a text in a colour."""
        if not self.has_color or not text:
            return text
        codes = ["1"] * bold + ([f"38;5;{color}"] if color is not None else [])
        return f"\x1b[{';'.join(codes)}m{text}\x1b[0m"


def screen(picture: Picture, endpoint: str, style: Style, is_paused: bool = False) -> list[str]:
    """Return the lines, at most `style.height` of them."""
    head = [
        *_gauges(picture, endpoint, style, is_paused),
        *_models(picture, style),
        *_processes(picture, style),
        "",
    ]
    events = _events(picture, style)
    room = max(3, style.height - len(head) - len(events) - 1)
    return (head + _requests(picture, style, room) + events)[: style.height]


# --- the server -----------------------------------------------------------------------------------


def _gauges(picture: Picture, endpoint: str, style: Style, is_paused: bool) -> list[str]:
    state = "  PAUSED" if is_paused else ""
    title = style.paint("quadriga top", bold=True) + f"  {endpoint}"[: style.width] + state
    gauges = picture.gauges
    if gauges is None:
        return [title, "waiting for the server"]
    total = max(1, gauges.pages_total)
    held, cached = 100 * gauges.pages_held / total, 100 * gauges.pages_cached / total
    hits = 100 * gauges.cached_tokens_total / max(1, gauges.prompt_tokens_total)
    lost = f" · {picture.num_lost} messages lost" if picture.num_lost else ""
    return [
        title,
        f"{gauges.running} running · {gauges.waiting} waiting · {picture.rate('steps'):.1f} steps/s"
        f" of {picture.step_ms:.0f} ms · generated {picture.rate('generation_tokens_total'):.0f}"
        f" tok/s · prompts {picture.rate('prompt_tokens_total'):.0f} tok/s{lost}"[: style.width],
        f"KV {_bar(held, cached, style)} held {held:.0f} % · cached {cached:.0f} % · hits"
        f" {hits:.0f} % · {gauges.retractions} retractions",
    ]


def _bar(held: float, cached: float, style: Style) -> str:
    num_held = round(BAR_WIDTH * held / 100)
    num_cached = min(BAR_WIDTH - num_held, round(BAR_WIDTH * cached / 100))
    free = "·" * (BAR_WIDTH - num_held - num_cached)
    return style.paint("█" * num_held, 35) + style.paint("▒" * num_cached, 75) + free


def _models(picture: Picture, style: Style) -> list[str]:
    """Return which models have a worker; no line for a server with one model."""
    states = {True: "loaded", False: "unloaded"}
    models = [f"{name} {states[has_worker]}" for name, has_worker in picture.models.items()]
    if not models:
        return []
    models[0] = f"models: {models[0]}"
    return _wrapped(models, style)[:MAX_MODEL_LINES]


def _processes(picture: Picture, style: Style) -> list[str]:
    parts = []
    for row in picture.processes.values():
        share = "  …" if row.cpu_share is None else f"{100 * row.cpu_share:3.0f}"
        parts.append(f"{row.about.name} {share} % {row.about.resident_bytes / MEBIBYTE:.0f} MiB")
    return _wrapped(parts, style)


def _wrapped(parts: Sequence[str], style: Style) -> list[str]:
    """Return lines of parts with dots between them."""
    lines, line = [], ""
    for part in parts:
        if line and len(line) + 3 + len(part) > style.width:
            lines.append(line)
            line = ""
        line = f"{line} · {part}" if line else part
    return [*lines, line] if line else []


# --- requests and events --------------------------------------------------------------------------


def _requests(picture: Picture, style: Style, room: int) -> list[str]:
    legend = " ".join(
        style.paint(BLOCK if style.has_color else cell, COLORS[cell]) + f" {text}"
        for cell, text in LEGEND
    )
    lines = [f"{style.paint(COLUMNS, bold=True)} {legend}"]
    rows = sorted(picture.rows.values(), key=_order)
    now = 0.0 if picture.server is None else picture.server.time
    shown = rows[: room - 2]
    lines += [_request(row, now, style) for row in shown]
    num_others = len(rows) - len(shown) + picture.num_hidden
    return [*lines, f"… and {num_others} other requests"] if num_others else lines


def _order(row: RequestRow) -> tuple[bool, float, int]:
    """Running requests first, the oldest on top."""
    return not row.is_running, row.about.received_at, row.about.seq


def _request(row: RequestRow, now: float, style: Style) -> str:
    about = row.about
    doing = row.doing if row.is_running else f"waits: {row.doing}" if row.doing else ""
    age = max(0.0, now - about.received_at) if now else 0.0
    left = (
        f"{_short(about.request_id):<{ID_CHARS}} {about.num_prompt_tokens:>7}"
        f" {about.cached_tokens:>7} {row.num_generated:>6} {age:>6.1f}s  {doing:<17}"
    )
    return f"{left} {_lane(row, style.width - len(left) - 1, style)}"


def _short(name: str) -> str:
    """Return the end of an id, which differs between the requests of one client."""
    return name if len(name) <= ID_CHARS else f"…{name[1 - ID_CHARS :]}"


def _lane(row: RequestRow, width: int, style: Style) -> str:
    if width < MIN_LANE:
        return ""
    cells = "".join(list(row.lane)[-width:])
    if not style.has_color:
        return cells
    pieces, start = [], 0
    for place in range(1, len(cells) + 1):
        if place == len(cells) or cells[place] != cells[start]:
            cell, count = cells[start], place - start
            pieces.append(
                cell * count if cell == NO_CELL else style.paint(BLOCK * count, COLORS[cell])
            )
            start = place
    return "".join(pieces)


def _events(picture: Picture, style: Style) -> list[str]:
    lines = [
        f"{time.strftime('%H:%M:%S', time.localtime(at))} {text}"[: style.width]
        for at, text in list(picture.events)[-NUM_EVENTS:]
    ]
    return ["", *lines] if lines else []


# A full-screen terminal: an alternate screen without cursor, single keys, and all of it undone.

ENTER, LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
HOME, CLEAR_LINE, CLEAR_BELOW = "\x1b[H", "\x1b[K", "\x1b[J"


class FullScreen:
    """Draws frames. Made by `full_screen`."""

    def __init__(self, output: TextIO) -> None:
        self._output = output

    def draw(self, lines: list[str]) -> None:
        """Replace what is shown, without flicker."""
        text = f"{CLEAR_LINE}\r\n".join(lines)
        self._output.write(f"{HOME}{text}{CLEAR_LINE}{CLEAR_BELOW}")
        self._output.flush()


@contextmanager
def full_screen(output: TextIO) -> Iterator[FullScreen]:
    """Take over the terminal in a `with` block, and give it back, also after SIGTERM or SIGHUP."""
    before = {number: signal.signal(number, _leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    keys = sys.stdin.fileno() if sys.stdin.isatty() else None
    mode = None if keys is None else termios.tcgetattr(keys)
    try:
        if keys is not None:
            tty.setcbreak(keys)
        output.write(ENTER)
        yield FullScreen(output)
    finally:
        output.write(LEAVE)
        output.flush()
        if keys is not None and mode is not None:
            termios.tcsetattr(keys, termios.TCSADRAIN, mode)
        for number, handler in before.items():
            signal.signal(number, handler)


def _leave(number: int, _: FrameType | None) -> None:
    """Unwind the stack, so that the terminal is given back."""
    raise SystemExit(128 + number)


def read_key() -> str:
    """Return the key that was pressed; "" for none."""
    return os.read(sys.stdin.fileno(), 1).decode(errors="replace")


# On a terminal `quadriga top` fills the screen until q is pressed. Otherwise it prints plain
# frames, so that it can be piped; --once prints one and ends, --json prints the messages
# themselves.

MIN_INTERVAL_S, MAX_INTERVAL_S = 0.05, 60.0
PIPE_SIZE = (160, 60)  # columns and lines of a frame that goes to no terminal


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the command."""
    add_server(parser)
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
    if is_web_address(arguments.endpoint):
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
