"""A disk that fails ends neither the server nor, once it works again, the journal."""

import errno
import itertools
import os
import random
import threading
from pathlib import Path

import pytest

from scheduler_proc.journal import writer as journal_module
from scheduler_proc.journal.file import NOT_GIVEN_UP, Syncer, run_tag
from scheduler_proc.journal.recovery import read_journal
from scheduler_proc.journal.writer import RETRY_INTERVAL_S
from tests.unit.journal_runs import Run, faulty_os, full_disk, outline, release_journal

State = list[tuple[object, ...]]


def live_of(run: Run) -> State:
    """Return what a whole journal holds: all requests."""
    return sorted(
        (message.request_id, request.index, request.tokens[2:].tolist(), request.finished, False)
        for message, request, _ in run.journal._kept.values()
    )


def live_through(run: Run, num_rounds: int, source: random.Random) -> list[State]:
    """Run some rounds of a scheduler. Return what a journal would hold after each of them."""
    states = [live_of(run)]
    for number in range(num_rounds):
        requests = [kept.request for kept in run.journal._kept.values()]
        going_on = [request for request in requests if not request.finished]
        if number % 3 == 0:
            run.accept(f"{len(requests):03}")
        for request in going_on:
            run.generate(request, source.randrange(3, 90))
        if len(going_on) > 2:
            run.finish(going_on[0], acknowledged=False)
        run.journal.commit()
        states.append(live_of(run))
    return states


CALLS = ("open", "write", "replace", "fdatasync", "fsync", "ftruncate", "pwrite", "unlink", "dup",
         "close")  # fmt: skip


@pytest.mark.parametrize("is_durable", [False, True])
@pytest.mark.parametrize("also", [(), ("ftruncate",), ("unlink", "pwrite")])
def test_after_any_failed_call_the_file_is_whole_and_the_journal_recovers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_durable: bool, also: tuple[str, ...]
) -> None:
    monkeypatch.setattr(journal_module, "COMPACT_BYTES", 400)
    monkeypatch.setattr(Syncer, "mark_dirty", lambda _: None)  # it has a test of its own
    num_failures = 0
    for name in CALLS:
        for number in itertools.count(1):
            directory = tmp_path / f"{name}{number}"
            with faulty_os() as faulty:
                faulty.fails = lambda called, n, name=name, number=number: (  # type: ignore[misc]
                    errno.EIO if (called, n) == (name, number) or called in also else 0
                )
                run = Run(directory, durable=is_durable)
                states = live_through(run, 30, random.Random(number))
            if faulty.calls[name] < number:
                release_journal(run.journal)
                break
            num_failures += 1
            _check(run, states, can_mark=not also or also == ("ftruncate",))
            release_journal(run.journal)
    assert num_failures > 20


def _check(run: Run, states: list[State], can_mark: bool) -> None:
    """Check what another scheduler would read now that the disk works again."""
    contents = read_journal(run.path)
    stale = contents.given_up_by == run_tag("run") or contents.header is None
    if not stale:
        assert outline(contents.requests) in states, "half a round is read"
    if run.journal.state == "failed":
        assert stale or not can_mark, "a scheduler would go on with what may have ended"
        live_through(run, 3, random.Random(1))
        assert run.journal.state == "failed", "not before its time"
        run.now += RETRY_INTERVAL_S
    else:
        assert not stale
        assert outline(contents.requests) == states[-1]
    states = live_through(run, 3, random.Random(2))
    contents = read_journal(run.path)
    assert run.journal.state == "on"
    assert contents.given_up_by == NOT_GIVEN_UP
    assert (outline(contents.requests), contents.num_unread_bytes) == (states[-1], 0)


def test_writes_that_take_half_of_the_bytes_are_finished(tmp_path: Path) -> None:
    with faulty_os() as faulty:
        faulty.is_short = True
        run = Run(tmp_path)
        states = live_through(run, 20, random.Random(0))
    assert outline(run.recovered()) == states[-1]
    release_journal(run.journal)


def test_half_a_frame_is_taken_back(tmp_path: Path) -> None:
    with faulty_os() as faulty:
        run = Run(tmp_path, durable=True)
        size = run.journal._file.size
        faulty.fails = full_disk
        run.accept("a")
        run.journal.commit()
    assert faulty.calls["ftruncate"] == 1
    assert run.path.stat().st_size == size
    release_journal(run.journal)


def test_a_disk_that_stays_full_is_tried_now_and_then_and_named_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with faulty_os() as faulty:
        run = Run(tmp_path)
        opened = faulty.calls["open"]
        faulty.fails = full_disk
        for _ in range(50):
            live_through(run, 2, random.Random(0))
            run.now += 1.0
        assert faulty.calls["open"] - opened == 4, "a compaction every 10 s"
        run.now += RETRY_INTERVAL_S
        run.journal.commit()
        assert faulty.calls["open"] - opened == 4, "only where something is to be written"
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert f"{run.path} cannot be written ([Errno 28] No space left" in caplog.text
    assert "Make room there, or restart with another --journal" in caplog.text
    assert os.listdir(tmp_path) == [], "half a file would only take room"
    caplog.clear()
    states = live_through(run, 2, random.Random(0))
    assert outline(run.recovered()) == states[-1]
    assert "is written again, with all requests" in caplog.text
    release_journal(run.journal)


def test_a_sync_that_failed_is_followed_by_a_fresh_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The system may have dropped the pages, and the next sync of that file says all is well."""
    failed = threading.Event()

    def fails(name: str, number: int) -> int:
        if (name, number) == ("fdatasync", 2):
            failed.set()
            return errno.EIO
        return 0

    with faulty_os() as faulty:
        faulty.fails = fails
        run = Run(tmp_path, durable=True)
        inode = run.path.stat().st_ino
        (request,) = run.accept("a")
        run.journal.commit()
        assert failed.wait(10)
        syncer = run.journal._file._syncer
        assert syncer is not None
        with syncer._lock:  # the thread has said so
            pass
        while syncer._error is None:
            threading.Event().wait(0.001)
        run.generate(request, 5)
        run.journal.commit()
        assert run.journal.state == "failed"
        assert "Input/output error" in caplog.text
        run.now += RETRY_INTERVAL_S
        run.generate(request, 6)
        run.journal.commit()
    assert run.journal.state == "on"
    assert run.path.stat().st_ino != inode
    assert outline(run.recovered()) == [("a", 0, [5, 6], False, False)]
    release_journal(run.journal)


def test_a_journal_that_cannot_be_removed_does_not_keep_a_server_from_its_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(tmp_path)
    with faulty_os() as faulty:
        faulty.fails = lambda name, _number: errno.EROFS if name == "unlink" else 0
        run.journal.close()
    assert f"{run.path} cannot be removed ([Errno 30] Read-only file system): remove it" in (
        caplog.text
    )
    release_journal(run.journal)


def test_random_disk_errors_leave_no_half_written_frame(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "COMPACT_BYTES", 400)
    monkeypatch.setattr(Syncer, "mark_dirty", lambda _: None)
    for seed in range(40):
        source = random.Random(seed)
        with faulty_os() as faulty:
            faulty.fails = _at_random(source)
            run = Run(tmp_path / str(seed), durable=seed % 2 > 0)
            states = live_through(run, 30, source)
        run.now += RETRY_INTERVAL_S
        states = live_through(run, 2, source)
        contents = read_journal(run.path)
        assert (outline(contents.requests), contents.num_unread_bytes) == (states[-1], 0)
        release_journal(run.journal)


def _at_random(source: random.Random):  # type: ignore[no-untyped-def]
    errors = (errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EFBIG, errno.EMFILE)
    return lambda _name, _number: source.choice(errors) if source.random() < 0.1 else 0
