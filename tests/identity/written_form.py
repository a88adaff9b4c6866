"""What is written down of an answer: all but what differs between two runs of a server."""

import contextlib
import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any

from tests.identity.http_requests import Call
from tests.identity.servers import Answer

MAX_REQUEST_CHARS = 2000  # of a request, which is written down to be read
# Headers that are recorded by their presence only: their values follow from the body, or from time.
BARE_HEADERS = {"date": "<date>", "content-length": "<length>", "traceparent": "<trace>"}
# Metrics whose values are the same in each run.
STEADY_METRICS = re.compile(
    r"quadriga:(http_errors_total|response_saves_total|batch_lines_total"
    r"|request_params_n|request_prompt_tokens|stored_conversations|streams_resumed_total)"
)


def written(call: Call, answer: Answer, hider: "Hider", hidden: Mapping[str, str]) -> str:
    """Return the text of a call and its answer.

    Args:
        call: as it is in the list of requests.
        answer: as it came.
        hider: that of the whole recording.
        hidden: texts of the server that differ between two runs, and what stands for them.
    """
    text = hider.hide(_render(call, answer), call.name, hidden, call.vary)
    return "\n".join([*_request_lines(call), text, ""])


def _request_lines(call: Call) -> list[str]:
    lines = [f"=== {call.server}: {call.name}", call.target]
    lines += [f"> {name}: {value}" for name, value in call.headers.items()]
    sent = call.body if call.raw is None else call.raw
    if isinstance(sent, bytes):
        lines.append(sent.decode("latin-1").encode("unicode_escape").decode()[:MAX_REQUEST_CHARS])
    elif sent is not None:
        lines.append(json.dumps(sent, ensure_ascii=False)[:MAX_REQUEST_CHARS])
    return lines


def _render(call: Call, answer: Answer) -> str:
    """Return the text of an answer."""
    lines = [f"--- {answer.status}"]
    for name, value in sorted(answer.headers):
        lines.append(f"{name}: {_header(name, value, answer)}")
    lines.append("")
    if answer.kind == "text/event-stream":
        lines.append(_events(call, answer))
    elif answer.kind == "application/x-ndjson":
        lines += _text(answer.body).split("\n")[-call.tail - 1 if call.tail else 0 :]
    elif answer.body:
        lines.append(_body(call, answer))
    return "\n".join(lines)


def _header(name: str, value: str, answer: Answer) -> str:
    if name.lower() == "server-timing":
        is_stream = answer.header("Transfer-Encoding") == "chunked"
        return "<stages>" if is_stream else re.sub(r"dur=[\d.]+", "dur=<ms>", value)
    return BARE_HEADERS.get(name.lower(), value)


def _events(call: Call, answer: Answer) -> str:
    """Return the events of a stream, each as its lines; comments and pings are left out."""
    blocks = _text(answer.body).split("\n\n")
    rest = [] if answer.is_cut or not blocks[-1] else [f"<no end of event> {blocks[-1]}"]
    events: list[list[str]] = []
    for block in blocks[:-1]:
        lines = [line for line in block.split("\n") if not line.startswith(":")]
        if lines and lines[0] != "event: keepalive":
            events.append(lines)
    if call.shape:
        return "\n".join(json.dumps(event) for event in shape([*map(_fields, events)]))
    texts = ["\n".join(lines) for lines in events]
    return "\n\n".join([*texts[-call.tail if call.tail else 0 :], *rest])


def _fields(lines: list[str]) -> dict[str, Any]:
    """Return the fields of an event with JSON data."""
    fields = dict(line.split(": ", 1) for line in lines)
    return {**fields, "data": json.loads(fields["data"])}


def _body(call: Call, answer: Answer) -> str:
    if answer.kind == "text/plain" and answer.body.startswith(b"# HELP"):
        return _metrics(answer.body.decode())
    try:
        text = answer.body.decode()
    except UnicodeDecodeError:
        text = ""
    if call.shape and answer.kind == "application/json":
        return json.dumps(shape(json.loads(text)), ensure_ascii=False)
    if not text or call.is_file:
        digest = hashlib.sha256(answer.body).hexdigest()
        return f"<{len(answer.body)} bytes, sha256 {digest}>"
    return text


def _text(body: bytes) -> str:
    return body.decode("utf-8", "backslashreplace")


def shape(value: Any) -> Any:
    """Return a JSON value without its numbers, and each list without items that are alike."""
    if isinstance(value, dict):
        return {name: shape(part) for name, part in value.items()}
    if isinstance(value, list):
        parts: list[Any] = []
        for part in (shape(part) for part in value if type(part) not in (int, float)):
            _add_shape(parts, part)
        return parts
    return 0 if type(value) in (int, float) else value


def _add_shape(parts: list[Any], new: Any) -> None:
    for index, part in enumerate(parts):
        with contextlib.suppress(ValueError):
            parts[index] = _merged(part, new)
            return
    parts.append(new)


def _merged(first: Any, second: Any) -> Any:
    """Return what two shapes have together. Raise ValueError if they are of different things."""
    if first == second or second is None or second == []:
        return first
    if first is None or first == []:
        return second
    if isinstance(first, dict) and isinstance(second, dict) and [*first] == [*second]:
        return {name: _merged(first[name], second[name]) for name in first}
    if isinstance(first, list) and isinstance(second, list):
        return shape([*first, *second])
    raise ValueError


def _metrics(text: str) -> str:
    """Return the names, types and labels of metrics, and the values of those that are steady."""
    lines = []
    for line in text.splitlines():
        name = line.rpartition(" ")[0]
        is_steady = line.startswith("#") or STEADY_METRICS.match(line) is not None
        lines.append(line if is_steady else f"{name} <value>")
    return "\n".join(lines)


class Hider:
    """Replaces what differs between two runs of one server."""

    def __init__(self) -> None:
        self._ids: dict[str, str] = {}

    def hide(
        self, text: str, name: str, hidden: Mapping[str, str], vary: tuple[str, ...] = ()
    ) -> str:
        """Return the text with placeholders.

        Args:
            text: of an answer.
            name: of its call, with which the ids are numbered that appear first in it.
            hidden: texts that differ, and their placeholders.
            vary: patterns, the first group of which is hidden.
        """
        for known, shown in hidden.items():
            text = text.replace(known, shown)
        for pattern in vary:
            text = re.sub(pattern, _without_group, text)
        for known_pattern, replacement in PATTERNS:
            text = known_pattern.sub(replacement, text)
        num_known = len(self._ids)
        for found in IDS.finditer(text):
            number = len(self._ids) - num_known + 1
            self._ids.setdefault(found[1] or found[2], f"<{name} {number}>")
        for known, shown in self._ids.items():
            text = text.replace(known, shown)
        return text


def _without_group(match: "re.Match[str]") -> str:
    start, end = match.start(1) - match.start(), match.end(1) - match.start()
    return f"{match.group()[:start]}<varies>{match.group()[end:]}"


# Random ids: 32 digits, 8-4-4-4-12 of them, and the 9 letters of a call. The hashes of a receipt
# are no ids.
_HASHES = "".join(rf'(?<!"{name}":")' for name in ("params", "prompt", "tokens"))
IDS = re.compile(
    rf"(?<![0-9a-f]){_HASHES}([0-9a-f]{{32}}|[0-9a-f]{{8}}(?:-[0-9a-f]{{4}}){{3}}-[0-9a-f]{{12}})"
    r'(?![0-9a-f])|"(?:id|call_id|tool_call_id|tool_use_id)":"([A-Za-z0-9]{9})"'
)
_NUMBER = r"-?\d+(?:\.\d+)?(?:e[+-]?\d+)?"
_TIMES = (
    r"created|\w+_at|\w+_ms|\w+_ms_p\d+|\w+_per_second|tokens_per_second|\w+_duration|e2e_latency"
    r"|\w+_seconds|seconds|slowdown"
)


def _time(match: "re.Match[str]") -> str:
    kind = "time" if set(match[2]) <= set("0123456789-") else "time."
    return f"{match[1]}<{kind}>"


PATTERNS: list[tuple["re.Pattern[str]", Any]] = [
    (re.compile(rf'("(?:{_TIMES})": ?)({_NUMBER})(?=[,}}])'), _time),
    (re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?(Z|\+\d\d:\d\d)"), r"<date\2>"),
    (re.compile(r'("title":"Quadriga","version":)"[^"]*"'), r'\1"<version>"'),
    (re.compile(r'"quadriga \d[\w.]*"'), '"quadriga <version>"'),
    (
        re.compile(r"[\d.]+( m?s in the simulation, and was )[\d.]+( m?s)"),
        r"<time>\1<time>\2",
    ),
    (re.compile(r"native [0-9a-f]{24}"), "native <kernels>"),
    (re.compile(r'("(?:launcher|\w+_proc(?:/\d+)?)": ?)\d+'), r"\1<pid>"),
    (re.compile(r"((?<![0-9a-f])[0-9a-f]{32})-\d+"), r"\1-<number>"),
]
