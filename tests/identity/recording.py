"""Record what the web gateway answers, to prove that a change of its code changes no answer.

python -m tests.identity.recording --write FILE
    send the requests of http_requests.py to servers of this checkout, and write down the answers
python -m tests.identity.recording --compare [FILE]
    do so again, and print what differs from FILE, by default from the committed recording; the exit
    code is 1 if anything does

A FILE that ends with .gz is compressed. The servers are whole ones, started by launcher.py with the
model of model.py, and one request follows another. Nothing of the product is imported, so that two
commits can be compared however the files between them were moved:

    git worktree add /tmp/before COMMIT
    cp -r tests/identity /tmp/before/tests/
    (cd /tmp/before && PYTHON -m tests.identity.recording --write /tmp/before.gz)
    PYTHON -m tests.identity.recording --compare /tmp/before.gz

The committed recording is made again by `--write tests/identity/answers.txt.gz`, at the commit
before the change. It has log-probabilities with all their digits, the last of which depend on the
CPU: on another machine, make a recording of the commit before, as above. A C++ compiler is needed,
because only the native kernels compute the same bits whatever else is in the batch.

A recording has status, headers and body of each answer, byte by byte, with the order of its fields.
A stream is recorded event by event, however it was cut into chunks. What differs between two runs
of one server is replaced:

- Ids, by the request whose answer has them first, so that references stay checked.
- Times, durations, dates, ports, directories, process ids, the version, the kernels' hash.
- Comments and events keepalive in streams, and the header Server-Timing of streams.
- Where a request says `shape`, all numbers, and the items of lists that are alike: of traces, the
  live feed and simulations only names and structure are compared. So it is with metrics, but for
  those in STEADY_METRICS.
- What a request names in `vary`.
"""

import argparse
import concurrent.futures
import difflib
import gzip
import json
import re
import sys
import tempfile
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.identity.http_requests import CALLS, Call, all_calls
from tests.identity.servers import (
    ANSWER_TIMEOUT_S,
    POLL_S,
    Answer,
    Server,
    Servers,
    fillers,
    info,
    num_open,
    send,
    settle,
    wait_until,
)
from tests.identity.written_form import Hider, written

GOLDEN = Path(__file__).with_name("answers.txt.gz")
MISSING = "missing"
CONTEXT_CHARS = 100  # of a long line, around the place where it differs


class Recorder:
    """Send calls, and write down their answers.

    Attributes:
        blocks: the texts of the calls so far.
    """

    def __init__(self, servers: Servers) -> None:
        self._servers = servers
        self._kept: dict[str, Any] = {}
        self._hider = Hider()
        self.blocks: list[str] = []

    def record(self, call: Call) -> None:
        """Send a call, and those that are sent while it is open."""
        server = self._servers.running(call.server)
        settle(server)
        with fillers(server, call.fillers):
            self._record(server, call)

    def _record(self, server: Server, call: Call) -> None:
        time.sleep(call.pause_s)
        if not call.during:
            self.write(server, call, self._ask(server, call))
            return
        wanted = num_open(info(server)) + 1
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            answer = pool.submit(self._ask, server, call)
            wait_until(server, lambda found: num_open(found) >= wanted, call.name)
            for other in call.during:
                self._record(server, other)
            self.write(server, call, answer.result())

    def _ask(self, server: Server, call: Call) -> Answer:
        deadline = time.monotonic() + ANSWER_TIMEOUT_S
        while True:
            answer = send(server, self._filled(call))
            if call.until is None or time.monotonic() > deadline:
                return answer
            path, wanted = call.until
            if find(answer, path) in (*wanted, MISSING):
                return answer
            time.sleep(POLL_S)

    def _filled(self, call: Call) -> Call:
        """Return a call with the values of earlier answers in place of their names."""
        body = call.body
        if isinstance(body, bytes):
            body = self._fill(body.decode("utf-8", "surrogateescape")).encode(
                "utf-8", "surrogateescape"
            )
        elif body is not None:
            body = self._fill(json.dumps(body, ensure_ascii=False)).encode()
        headers = {name: self._fill(value) for name, value in call.headers.items()}
        return replace(call, target=self._fill(call.target), body=body, headers=headers)

    def _fill(self, text: str) -> str:
        for name in sorted(self._kept, key=len, reverse=True):
            value = self._kept[name]
            if not isinstance(value, str):
                text = text.replace(f'"${name}"', json.dumps(value))
            text = text.replace(f"${name}", str(value))
        return text

    def write(self, server: Server, call: Call, answer: Answer) -> None:
        """Write down an answer, and keep what later calls send of it."""
        for name, path in call.keep.items():
            self._kept[name] = find(answer, path)
        self.blocks.append(written(call, answer, self._hider, server.hidden))


def find(answer: Answer, path: str) -> Any:
    """Return a header, or a value of the body; MISSING if it is not there.

    Args:
        answer: of a call.
        path: `header:NAME`; or names and indices with dots between them, of the body, of the first
            event of a stream, or with `last:` before it of its last one.
    """
    place, _, name = path.rpartition(":")
    if place == "header":
        return answer.header(name)
    try:
        value = _values(answer)[-1 if place == "last" else 0]
        for step in name.split("."):
            value = value[int(step)] if isinstance(value, list) else value[step]
    except (LookupError, TypeError, ValueError):
        return MISSING
    return value


def _values(answer: Answer) -> list[Any]:
    if answer.kind == "text/event-stream":
        found = re.findall(rb"^data: (\{.*)$", answer.body, re.M)
        return [json.loads(data) for data in found]
    if answer.kind == "application/x-ndjson":
        return [json.loads(line) for line in answer.body.splitlines()]
    return [json.loads(answer.body)]


# --- the command ----------------------------------------------------------------------------------


def record() -> str:
    """Return the recording of all calls."""
    last_calls = {call.server: call for call in CALLS}
    with tempfile.TemporaryDirectory() as directory, Servers(Path(directory)) as servers:
        recorder = Recorder(servers)
        for call in CALLS:
            recorder.record(call)
            if call is last_calls[call.server]:
                servers.stop(call.server)
    return "\n".join(recorder.blocks)


def read(path: Path) -> str:
    data = path.read_bytes()
    return (gzip.decompress(data) if path.suffix == ".gz" else data).decode()


def write(path: Path, text: str) -> None:
    data = text.encode()
    path.write_bytes(gzip.compress(data, 9, mtime=0) if path.suffix == ".gz" else data)


def difference(before: str, after: str) -> str:
    """Return what differs between two recordings, call by call; "" for nothing."""
    parts = []
    old, new = _by_name(before), _by_name(after)
    for name in [*old, *(name for name in new if name not in old)]:
        if old.get(name) == new.get(name):
            continue
        if name not in old or name not in new:
            parts.append(f"{name}: only {'before' if name in old else 'after'}")
            continue
        lines = list(difflib.unified_diff(
            old[name].splitlines(), new[name].splitlines(), "before", "after", lineterm="", n=0
        ))  # fmt: skip
        parts.append("\n".join([name, *_shortened(lines[2:])]))
    if not parts and before != after:
        parts.append("the order of the calls differs")
    return "\n\n".join(parts)


def _by_name(text: str) -> dict[str, str]:
    blocks = re.split(r"^(?==== )", text, flags=re.M)
    return {block.partition("\n")[0]: block for block in blocks if block}


def _shortened(lines: list[str]) -> list[str]:
    """Cut long lines of a diff to what is around the first difference of a pair of them."""
    removed = [line for line in lines if line.startswith("-")]
    added = [line for line in lines if line.startswith("+")]
    starts = {}
    for old, new in zip(removed, added, strict=False):
        pairs = zip(old[1:], new[1:], strict=False)
        common = next((place for place, (a, b) in enumerate(pairs) if a != b), 0)
        starts[old] = starts[new] = max(0, common - CONTEXT_CHARS)
    return [_cut(line, starts.get(line, 0)) for line in lines]


def _cut(line: str, start: int) -> str:
    text = line[1:]
    if len(text) <= 3 * CONTEXT_CHARS:
        return line
    before, after = "…" if start else "", "…" if start + 3 * CONTEXT_CHARS < len(text) else ""
    return f"{line[0]}{before}{text[start : start + 3 * CONTEXT_CHARS]}{after}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Record what the web gateway answers.")
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--write", type=Path, metavar="FILE", help="write a recording")
    action.add_argument(
        "--compare", type=Path, metavar="FILE", nargs="?", const=GOLDEN,
        help="make a recording, and print what differs from FILE",
    )  # fmt: skip
    arguments = parser.parse_args()
    before = None if arguments.write else read(arguments.compare)
    began_at = time.monotonic()
    after = record()
    print(f"{summary()}; {time.monotonic() - began_at:.0f} s", file=sys.stderr)
    if before is None:
        write(arguments.write, after)
    elif text := difference(before, after):
        print(text)
        sys.exit(1)


def summary() -> str:
    counts = Counter(call.api for call in all_calls())
    return f"{counts.total()} requests: " + ", ".join(f"{n} {api}" for api, n in counts.items())


if __name__ == "__main__":
    main()
