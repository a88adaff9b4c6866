"""The lines of `quadriga top`, for a terminal or for a file."""

import time
from dataclasses import dataclass

from quadriga.cli.top.picture import NO_CELL, Picture, RequestRow

# 256-colour numbers of the cells of a lane.
COLORS = {"d": 35, "P": 33, "p": 75, "r": 141, ".": 240, "x": 196}
LEGEND = (("d", "decode"), ("P", "prefill"), ("p", "chunk"), ("r", "again"), (".", "waits"),
          ("x", "retracted"))  # fmt: skip
BLOCK = "■"
MIN_LANE = 10
BAR_WIDTH = 24
NUM_EVENTS = 5
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
    head = [*_gauges(picture, endpoint, style, is_paused), *_processes(picture, style), ""]
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


def _processes(picture: Picture, style: Style) -> list[str]:
    parts, line = [], ""
    for row in picture.processes.values():
        share = "  …" if row.cpu_share is None else f"{100 * row.cpu_share:3.0f}"
        part = f"{row.about.name} {share} % {row.about.resident_bytes / MEBIBYTE:.0f} MiB"
        if line and len(line) + 3 + len(part) > style.width:
            parts.append(line)
            line = ""
        line = f"{line} · {part}" if line else part
    return [*parts, line] if line else []


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
