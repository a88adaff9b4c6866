"""Record the requests of agents in a file (--record), so that bench.agents can send them again.

The file has a line of JSON for each answered call: its session, its times, its counts of tokens,
and the fields of its body that make the prompt. What a body shares with the line before of its
session is not written again. Nothing else is stored: no header, no key, no name of a tenant or a
user, no answer. docs/engineering/benchmarking.md has the format.

A thread writes. The event loop hands it the bytes of a body, and never waits: what does not fit
into the queue is left out and counted, and a disk that fails ends the recording, not a request.
"""

import hashlib
import json
import logging
import os
import queue
import secrets
import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from http_proc.core.call import Call
from http_proc.core.caller import current_caller
from http_proc.core.gateway import Gateway, Key
from http_proc.core.observe import CallRecord
from quadriga import clock, disk
from quadriga.client.types import Completion
from quadriga.errors import ConfigError

FORMAT, VERSION = "quadriga-sessions", 1
MAX_FILE_BYTES = 2**30
MAX_WAITING_BYTES = 64 * 1024 * 1024  # bodies that wait for the disk
MAX_SESSIONS = 4096  # that may go on; of the others, the next line is a whole body
CLOSE_TIMEOUT_S = 5.0
DIGEST_BYTES = 16
# The field that grows from turn to turn, by the paths that are recorded.
TURNS = {
    "/v1/chat/completions": "messages",
    "/v1/messages": "messages",
    "/v1/responses": "input",
    "/v1/completions": "",
}
# Of a body: what the prompt is made of, and how long the answer may be.
FIELDS = frozenset(
    {
        "messages", "system", "instructions", "input", "prompt", "suffix", "tools", "functions",
        "tool_choice", "function_call", "parallel_tool_calls", "chat_template_kwargs",
        "reasoning_effort", "reasoning", "thinking", "max_tokens", "max_completion_tokens",
        "max_output_tokens", "temperature", "stream", "model",
    }
)  # fmt: skip
# These refer to what the server has stored: such a call cannot be sent again.
STORED = ("previous_response_id", "conversation")


class RecordedCall(NamedTuple):
    """An answered call, as the thread gets it.

    Attributes:
        path: of the endpoint.
        body: JSON.
        owner: who must not share a session with others.
        session: what the caller calls its session; "" where it does not say.
        began_at: Unix seconds.
        first_token_s, seconds: from then until the first token and the end of the answer; the
            first is None without a token.
        num_prompt, num_cached, num_generated: tokens of the first choice.
    """

    path: str
    body: bytes
    owner: str
    session: str
    began_at: float
    first_token_s: float | None
    seconds: float
    num_prompt: int
    num_cached: int
    num_generated: int


class KnownBody(NamedTuple):
    """Hashes of the last body of a session: of each field, and of each item of a list."""

    fields: dict[str, bytes]
    items: dict[str, list[bytes]]


class SessionLines:
    """Write calls as lines, each in terms of the line before of its session.

    A call without a name for its session continues the one whose turns it begins with.
    """

    def __init__(self) -> None:
        self._salt = secrets.token_bytes(16)
        self._bodies: OrderedDict[str, KnownBody] = OrderedDict()
        self._by_turns: OrderedDict[bytes, str] = OrderedDict()

    def line(self, call: RecordedCall) -> bytes | None:
        """Return the line of a call; None for one that cannot be sent again."""
        whole = msgspec.json.decode(call.body)
        if not isinstance(whole, dict) or any(whole.get(name) for name in STORED):
            return None
        body = {name: value for name, value in whole.items() if name in FIELDS}
        named = call.session or whole.get("prompt_cache_key")
        turns = body.get(TURNS[call.path])
        hashes = _chain(call, self._salt, turns if isinstance(turns, list) else ())
        session = self._session(call, named if isinstance(named, str) else "", hashes)
        line = {
            "session": session,
            "path": call.path,
            "began_at": round(call.began_at, 3),
            "first_token_s": None if call.first_token_s is None else round(call.first_token_s, 4),
            "seconds": round(call.seconds, 4),
            "prompt_tokens": call.num_prompt,
            "cached_tokens": call.num_cached,
            "generated_tokens": call.num_generated,
            **self._difference(session, body),
        }
        if hashes:
            _keep(self._by_turns, hashes[-1], session)
        return msgspec.json.encode(line) + b"\n"

    def forget(self) -> None:
        """Write the next line of each session as a whole: the line before may not be there."""
        self._bodies.clear()
        self._by_turns.clear()

    def _session(self, call: RecordedCall, name: str, hashes: Sequence[bytes]) -> str:
        if name:
            return _hash(self._salt, call.owner.encode(), name.encode()).hex()
        # The same turns again are another session, or an answer that is tried again.
        known = (self._by_turns.get(each) for each in reversed(hashes[:-1]))
        return next(filter(None, known), None) or secrets.token_hex(DIGEST_BYTES)

    def _difference(self, session: str, body: dict[str, Any]) -> dict[str, Any]:
        """Return the fields `body`, `same` and `keeps` of a line."""
        fields = {name: _hash(_encode(value)) for name, value in body.items()}
        items = {
            name: [_hash(_encode(item)) for item in value]
            for name, value in body.items()
            if isinstance(value, list)
        }
        before = self._bodies.get(session, KnownBody({}, {}))
        _keep(self._bodies, session, KnownBody(fields, items))
        same = [name for name, value in fields.items() if before.fields.get(name) == value]
        kept = {
            name: number
            for name, hashes in items.items()
            if name not in same and (number := _num_equal(hashes, before.items.get(name, [])))
        }
        rest = {
            name: value[kept[name] :] if name in kept else value
            for name, value in body.items()
            if name not in same
        }
        return {"body": rest, "same": same, "keeps": kept}


def _chain(call: RecordedCall, salt: bytes, turns: Sequence[Any]) -> list[bytes]:
    """Return a hash for the first turn, the first two, and so on."""
    hashes, last = list[bytes](), _hash(salt, call.owner.encode(), call.path.encode())
    for turn in turns:
        last = _hash(last, _encode(turn))
        hashes.append(last)
    return hashes


def _num_equal(hashes: Sequence[bytes], before: Sequence[bytes]) -> int:
    pairs = zip(hashes, before, strict=False)
    return next((n for n, (one, other) in enumerate(pairs) if one != other),
                min(len(hashes), len(before)))  # fmt: skip


def _encode(value: Any) -> bytes:
    return msgspec.json.encode(value, order="deterministic")


def _hash(*parts: bytes) -> bytes:
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.digest()


def _keep(kept: "OrderedDict[Any, Any]", key: Any, value: Any) -> None:
    kept[key] = value
    kept.move_to_end(key)
    if len(kept) > MAX_SESSIONS:
        kept.popitem(last=False)


class SessionRecorder:
    """Append the answered calls of a gateway to a file, until it is full or the disk fails.

    Args:
        path: the file; it is made, and only its owner can read it.

    Attributes:
        num_left_out: calls that were not written.

    Raises:
        OSError: the file cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = disk.open_regular(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        self._size = os.fstat(self._file).st_size
        if self._size and os.pread(self._file, 1, self._size - 1) != b"\n":
            self._size += os.write(self._file, b"\n")  # a gateway was killed within a line
        self._lines = SessionLines()
        self._queue: queue.SimpleQueue[RecordedCall | None] = queue.SimpleQueue()
        self._num_waiting = 0
        self._lock = threading.Lock()
        self._has_ended = False
        self.num_left_out = 0
        self._thread = threading.Thread(target=self._run, name="recorder", daemon=True)
        self._thread.start()

    @property
    def is_recording(self) -> bool:
        """Whether further calls are written."""
        return not self._has_ended

    def put(self, call: RecordedCall) -> None:
        """Record a call, or leave it out where too much waits. Never wait."""
        with self._lock:
            has_room = self._num_waiting + len(call.body) <= MAX_WAITING_BYTES
            if self._has_ended or not has_room:
                self.num_left_out += 1
                return
            self._num_waiting += len(call.body)
        self._queue.put(call)

    def close(self) -> None:
        """Write what waits, as far as that takes no more than seconds."""
        self._queue.put(None)
        self._thread.join(CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        """Write calls until `close`."""
        while (call := self._queue.get()) is not None:
            try:
                if not self._has_ended:
                    self._write(call)
            except OSError as error:
                self._end(f"{error.strerror}: a disk that is full or gone")
            except (msgspec.DecodeError, UnicodeError, RecursionError):
                self.num_left_out += 1  # the API has refused or repaired what this does not read
            finally:
                with self._lock:
                    self._num_waiting -= len(call.body)
        os.close(self._file)

    def _write(self, call: RecordedCall) -> None:
        line = self._lines.line(call)
        if line is None:
            self.num_left_out += 1
            return
        if not self._size:
            line = json.dumps({"format": FORMAT, "version": VERSION}).encode() + b"\n" + line
        if self._size + len(line) > MAX_FILE_BYTES:
            self._end(f"the file has {self._size} bytes, and at most {MAX_FILE_BYTES} are written")
            return
        written = os.write(self._file, line)
        if written < len(line):
            os.truncate(self._file, self._size)
            self._end("the disk is full")
            return
        self._size += written

    def _end(self, reason: str) -> None:
        self._has_ended = True
        self._lines.forget()
        logging.warning("--record %s ends: %s; requests go on", self._path, reason)


class NoRecorder:
    """Record nothing: there is no --record."""

    def close(self) -> None:
        """Do nothing: nothing waits."""


RECORDER = Key[SessionRecorder]("recorder")


class Recording:
    """Take one call, from before its body is parsed until it is answered.

    Args:
        recorder: gets it.
        call: what is asked.
    """

    def __init__(self, recorder: SessionRecorder, call: Call) -> None:
        self._recorder = recorder
        self._path, self._body, self._session = call.path, call.body, call.session.name
        self._began_at = clock.now()

    def end(self, record: CallRecord) -> None:
        """Record the call, which was answered."""
        if not record.completions:
            return
        first: Completion = record.completions[0]
        times, usage, now = first.timings.token_times, first.usage, clock.now()
        self._recorder.put(
            RecordedCall(
                self._path,
                self._body,
                current_caller().owner,
                self._session,
                self._began_at,
                max(0.0, times[0] - self._began_at) if times else None,
                now - self._began_at,
                usage.prompt_tokens,
                usage.cached_tokens,
                usage.completion_tokens,
            )
        )


def begin_recording(gateway: Gateway, call: Call) -> Recording | None:
    """Return what records a call; None where it is not recorded. A line of a batch is not."""
    recorder = gateway.get(RECORDER)
    if recorder is None or call.path not in TURNS or call.priority is not None:
        return None
    return Recording(recorder, call) if recorder.is_recording else None


def open_recorder(gateway: Gateway, is_restart: bool) -> "SessionRecorder | NoRecorder":
    """Return what records the calls of a gateway, which are recorded from now on.

    Args:
        gateway: its state.
        is_restart: the gateway takes the place of another one: a disk that fails is only logged.

    Raises:
        ConfigError: the file cannot be written.
    """
    path = gateway.args.record
    if not path:
        return NoRecorder()
    try:
        recorder = gateway[RECORDER] = SessionRecorder(Path(path))
    except OSError as error:
        problem = f"--record {path} cannot be written: {error.strerror}"
        if is_restart:
            logging.warning("%s; requests go on", problem)
            return NoRecorder()
        raise ConfigError(f"{problem}; name a file in a directory of the server's user") from None
    logging.info("--record %s: the prompts of all users are written there", path)
    return recorder
