"""A journal of a fixed run, to prove that the format and the reading of journals stay as they are.

The run is that of the trace with priorities, which stops while requests wait, run and have ended.
A restarted scheduler of the same run goes on with the file to the end; one of another run resumes.

python -m tests.unit.journal_corpus --write     rewrite golden/journal*
"""

import argparse
import hashlib
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from quadriga.server.config.engine_args import SchedulerArgs
from quadriga.wire.packing import unpack_ids
from quadriga.wire.sockets import encode
from scheduler_proc.journal.file import JournalHeader
from scheduler_proc.journal.recovery import read_journal
from scheduler_proc.journal.writer import FILE_NAME, open_journal
from scheduler_proc.scheduler import Scheduler
from tests.unit.decision_log import DecisionLog
from tests.unit.decision_traces import PAGE_SIZE, priorities
from tests.unit.journal_runs import release_journal
from tests.unit.recorded_server import EOS, NUM_IDS, Server

GOLDEN = Path(__file__).parent / "golden"
WRITTEN, RESTARTED = GOLDEN / "journal", GOLDEN / "journal_taken_up"
EXPECTED = GOLDEN / "journal.json"
# An abort of all requests of a client has just ended them, which is not acknowledged yet.
END_US = 60_100
RUN, OTHER_RUN = "run-1", "run-2"
CONTEXT_LENGTH = 4096


class RunningServer(NamedTuple):
    """A server whose scheduler has recovered its journal, and the journal."""

    server: Server
    journal: Any


def write(directory: Path) -> bytes:
    """Run a scheduler with a journal in a directory, up to END_US, and return the file."""
    trace = priorities()
    server, journal = _open(directory, RUN, DecisionLog(), start_us=0)
    server.stops = trace.stops
    for at_us, message in trace.messages:
        server.send(at_us + 1, message)
    server.run(END_US)
    return _leave(directory, journal)


def restart(written: bytes, directory: Path) -> bytes:
    """Restart the scheduler of a run with its journal, and return the file that it writes."""
    _put(written, directory)
    _server, journal = _open(directory, RUN, DecisionLog(), END_US)
    return _leave(directory, journal)


def resume(written: bytes, directory: Path) -> bytes:
    """Let a scheduler of another run resume a journal, and return the file that it writes."""
    _put(written, directory)
    flags = {"journal": str(directory), "resume": True}
    _server, journal = _open(directory, OTHER_RUN, DecisionLog(), END_US, flags)
    return _leave(directory, journal)


def finish(written: bytes, directory: Path) -> dict[str, Any]:
    """Restart the scheduler with a journal, run to the end, and return the summary of its log."""
    _put(written, directory)
    log = DecisionLog()
    server, _journal = _open(directory, RUN, log, END_US)
    server.send(END_US + 1, ["detok", 0])
    server.send(10_000_000, ["info", b"alice", "info", {}])
    server.send(10_000_001, ["drain"])
    server.send(10_000_002, ["shutdown"])
    server.run()
    assert not (directory / FILE_NAME).exists(), "every request has ended"
    return log.summary


def contents(path: Path) -> list[dict[str, Any]]:
    """Read a journal and return its requests in a form for JSON."""
    return [
        {
            "seq": request.seq,
            "index": request.index,
            "submit": _as_json(_set_fields(request.message)),
            "max_new_tokens": request.max_new_tokens,
            "tokens": request.tokens.tolist(),
            "logprobs": _wire(request.logprobs),
            "first_token": request.first_token_at,
            "ended": None if request.ended is None else _wire(request.ended),
            "settled": request.acknowledged,
        }
        for request in read_journal(path).requests
    ]


def read_header(path: Path) -> Any:
    """Return the header of a journal as it is on disk."""
    return _wire(read_journal(path).header)


def expected() -> dict[str, Any]:
    """Return what is committed beside the journal."""
    document: dict[str, Any] = json.loads(EXPECTED.read_text())
    return document


def hash_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _open(
    directory: Path, run: str, log: DecisionLog, start_us: int, flags: dict[str, Any] | None = None
) -> RunningServer:
    trace = priorities()
    chosen = {"schedule_policy": "priority", "max_num_partial_prefills": 1, **(flags or {})}
    args = SchedulerArgs(**trace.flags, **chosen)
    header = JournalHeader(run, "tiny", "fingerprint", NUM_IDS, CONTEXT_LENGTH)
    journal, recovered = open_journal(
        args, directory, header, is_restart=start_us > 0 and not flags
    )
    server = Server(log, start_us)
    scheduler = Scheduler(
        args, frozenset({EOS}), server.worker, server.detok, server.clock, journal
    )
    scheduler.lifecycle.restore(recovered, first_seq=0)
    server.scheduler = scheduler
    slots = args.max_running_requests
    ready = ["ready", trace.num_pages, PAGE_SIZE, slots, "float32", "cpu", 0, "", 64]
    server.report(start_us, ready)
    return RunningServer(server, journal)


def _put(written: bytes, directory: Path) -> None:
    (directory / FILE_NAME).write_bytes(written)


def _leave(directory: Path, journal: Any) -> bytes:
    """Release the journal as the end of a process does, and return the file."""
    release_journal(journal)
    return (directory / FILE_NAME).read_bytes()


def _wire(message: Any) -> Any:
    return _as_json(msgspec.msgpack.decode(encode(message)))


def _set_fields(message: msgspec.Struct) -> dict[str, Any]:
    """Return the fields that have another value than their default, by name."""
    return {
        field.name: value
        for field in msgspec.structs.fields(message)
        if (value := getattr(message, field.name)) != _default(field)
    }


def _default(field: msgspec.structs.FieldInfo) -> Any:
    if field.default_factory is not msgspec.NODEFAULT:
        return field.default_factory()
    return field.default


def _as_json(value: Any) -> Any:
    """Return a value in a form that JSON has and that a reader understands.

    Bytes become text where they are printable, else a list of int32 where their length allows it,
    else hex digits; a struct becomes a map of the fields that are set.
    """
    if isinstance(value, msgspec.Struct):
        return _as_json(_set_fields(value))
    if isinstance(value, bytes):
        if value.isascii() and value.decode("ascii").isprintable():
            return value.decode("ascii")
        return value.hex() if len(value) % 4 else unpack_ids(value).tolist()
    if isinstance(value, dict):
        return {str(key): _as_json(element) for key, element in value.items()}
    if isinstance(value, list | tuple):
        return [_as_json(element) for element in value]
    return value


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--write", action="store_true", required=True)
    parser.parse_args()
    directory = Path(tempfile.mkdtemp())
    try:
        written = write(directory)
        WRITTEN.write_bytes(written)
        RESTARTED.write_bytes(restart(written, directory))
        document = {
            "header": read_header(WRITTEN),
            "resumed_by_another_run": hash_of(resume(written, directory)),
            "finished": finish(written, directory),
            "requests": contents(WRITTEN),
        }
    finally:
        shutil.rmtree(directory)
    requests = ",\n".join(f"  {json.dumps(request)}" for request in document.pop("requests"))
    rest = json.dumps(document, indent=1)[:-2]
    EXPECTED.write_text(f'{rest},\n "requests": [\n{requests}\n ]\n}}\n')


if __name__ == "__main__":
    main()
