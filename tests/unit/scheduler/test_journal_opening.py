"""Which journals a server accepts at its start, which it refuses, and with which error."""

import errno
import fcntl
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from quadriga.errors import ConfigError
from quadriga.server.config.engine_args import ReplicaPlace, SchedulerArgs
from scheduler_proc.journal import writer
from scheduler_proc.journal.events import StepEvents
from scheduler_proc.journal.recovery import RecoveredRequest
from scheduler_proc.journal.writer import (
    FILE_NAME,
    FileJournal,
    NoJournal,
    check_number_of_replicas,
    of_replica,
    open_journal,
)
from tests.unit.journal_runs import Run, faulty_os, full_disk, make_header, outline, release_journal


def crashed_run(directory: Path, name: str = "first") -> Run:
    """Return a run that accepted a request and crashed."""
    run = Run(directory, name)
    (a,) = run.accept("a")
    run.generate(a, 5)
    run.journal.commit()
    release_journal(run.journal)
    return run


def recover(
    directory: Path, run: str, is_restart: bool = False, resume: bool = False, **fields: Any
) -> list[RecoveredRequest]:
    """Return the requests that a scheduler recovers, which then crashes."""
    args = SchedulerArgs(journal=str(directory), resume=resume)
    journal, recovered = open_journal(args, Path(run), make_header(run, **fields), is_restart)
    release_journal(journal)
    return recovered


def test_requests_of_an_earlier_run_are_resumed_only_on_demand_and_never_lost_silently(
    tmp_path: Path,
) -> None:
    run = crashed_run(tmp_path)
    going_on = [("a", 0, [5], False, False)]
    assert outline(recover(tmp_path, "first", is_restart=True)) == going_on, "the same run goes on"
    assert outline(recover(tmp_path, "second", resume=True)) == going_on
    with pytest.raises(ConfigError, match="has 1 unfinished requests of an earlier run: add"):
        recover(tmp_path, "second")
    assert outline(recover(tmp_path, "second", is_restart=True, resume=True)) == going_on, (
        "its first scheduler died before it had written anything"
    )
    run = Run(tmp_path, "first")
    (request,) = run.accept("b")
    run.finish(request)
    run.journal.commit()
    release_journal(run.journal)
    assert recover(tmp_path, "second") == []
    run.path.unlink()
    assert recover(tmp_path, "second") == []
    off = open_journal(SchedulerArgs(no_journal=True), tmp_path, make_header())
    assert isinstance(off.journal, NoJournal)
    assert off.journal.state == "off"


def test_requests_of_an_earlier_run_are_numbered_from_0_on_with_their_choices_together(
    tmp_path: Path,
) -> None:
    run = Run(tmp_path, "first")
    run.requests.start_numbering_at(1 << 50)
    for name in "abc":
        run.accept(name, n=3)
    del run.journal._kept[(1 << 50) + 4]
    run.journal.compact()
    release_journal(run.journal)
    recovered = recover(tmp_path, "second", resume=True)
    assert [(request.message.request_id, request.index, request.seq) for request in recovered] == [
        ("a", 0, 0), ("a", 1, 1), ("a", 2, 2), ("b", 0, 3), ("b", 2, 5),
        ("c", 0, 6), ("c", 1, 7), ("c", 2, 8),
    ]  # fmt: skip
    assert recover(tmp_path, "first", is_restart=True)[0].seq == 1 << 50


@pytest.mark.parametrize(
    ("other", "named"),
    [
        ({"fingerprint": "f2", "model": "big"}, r"tiny \(fingerprint f1\).*server's is big \(f2\)"),
        ({"vocab_size": 99}, "tiny with a vocabulary of 100, and this server's tiny has 99"),
        ({"context_length": 63}, "a context of 64 tokens, and this server's is 63"),
    ],
)
def test_a_journal_of_another_model_is_refused_with_both_values_and_the_remedy(
    tmp_path: Path, other: dict[str, Any], named: str
) -> None:
    run = crashed_run(tmp_path)
    for resume in (True, False):
        with pytest.raises(ConfigError, match=f"{named}.*with that model and --resume.*or remove"):
            recover(tmp_path, "second", resume=resume, **other)
    assert len(recover(tmp_path, "first", is_restart=True, **other)) == 1, (
        "within a run the files may change: SIGHUP takes new weights"
    )
    assert len(recover(tmp_path, "second", resume=True, context_length=65)) == 1
    run = Run(tmp_path, "first")
    (request,) = run.accept("b")
    run.finish(request)
    run.journal.commit()
    release_journal(run.journal)
    assert recover(tmp_path, "second", resume=True, **other) == [], "nothing has to go on"


def old_format() -> bytes:
    """Return a journal of the format before frames had checksums."""
    return msgspec.msgpack.encode("first") + msgspec.msgpack.encode([[], [], [], [], []])


@pytest.mark.parametrize("content", [b"\x01\x02", b"\0" * 4096, old_format(), b"QDRJRNL2" * 9])
def test_a_file_that_is_no_journal_is_named_and_does_not_stop_a_running_server(
    tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / FILE_NAME).write_bytes(content)
    for resume in (True, False):
        with pytest.raises(ConfigError, match=f"{FILE_NAME} is no journal that this version"):
            recover(tmp_path, "run", resume=resume)
    assert recover(tmp_path, "run", is_restart=True) == []
    assert "is no journal that this version can read" in caplog.text


def test_an_empty_file_has_no_requests(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).touch()
    assert recover(tmp_path, "run") == []


def test_a_damaged_journal_is_replaced_only_on_demand(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(tmp_path, "first")
    (a,) = run.accept("a")
    run.finish(a)
    run.journal.commit()
    whole = run.path.stat().st_size
    run.accept("b")
    run.journal.commit()
    release_journal(run.journal)
    size = run.path.stat().st_size
    os.truncate(run.path, size - 1)
    with pytest.raises(ConfigError, match=f"{size - 1 - whole} bytes cannot be read.*--resume"):
        recover(tmp_path, "second")
    assert outline(recover(tmp_path, "second", resume=True)) == [("a", 0, [], True, True)]
    assert f"is damaged at byte {whole}" in caplog.text
    assert f"{size - 1 - whole} bytes are not read, 1 requests were" in caplog.text


def test_a_journal_belongs_to_one_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "LOCK_TIMEOUT_S", 0.0)
    args = SchedulerArgs(journal=str(tmp_path))
    first, _ = open_journal(args, Path("first"), make_header("first"))
    with pytest.raises(ConfigError, match=f"{tmp_path} is the journal of another server"):
        open_journal(args, Path("second"), make_header("second"))
    assert isinstance(first, FileJournal)
    assert not os.get_inheritable(first._file._directory_fd), "children must not keep it"
    release_journal(first)
    second, _ = open_journal(args, Path("second"), make_header("second"))
    release_journal(second)
    assert os.listdir(tmp_path) == [], "the lock is no file"


def test_a_scheduler_waits_for_the_one_before_it_to_be_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = crashed_run(tmp_path)
    dying = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(dying, fcntl.LOCK_EX)
    monkeypatch.setattr("scheduler_proc.journal.writer.time.sleep", lambda _: os.close(dying))
    assert outline(recover(tmp_path, "first", is_restart=True)) == outline(run.recovered())


def test_a_server_that_runs_goes_on_without_a_lock_and_leaves_the_file_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "LOCK_TIMEOUT_S", 0.0)
    other = Run(tmp_path, "other")
    content = other.path.read_bytes()
    args = SchedulerArgs(journal=str(tmp_path))
    journal, recovered = open_journal(args, Path("first"), make_header("first"), is_restart=True)
    journal.compact()
    assert (recovered, journal.state, other.path.read_bytes()) == ([], "failed", content)
    release_journal(other.journal)


def test_a_directory_that_cannot_be_used_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file"
    file.touch()
    for directory in (file / "journal", file, tmp_path / ("x" * 300)):
        with pytest.raises(ConfigError, match=f"--journal {directory} cannot be used .*choose"):
            recover(directory, "run")
    monkeypatch.setattr(os, "access", lambda *_: False)  # for root everything is allowed
    with pytest.raises(ConfigError, match="it cannot be read and written"):
        recover(tmp_path / "journal", "run")
    (tmp_path / "other" / FILE_NAME).mkdir(parents=True)
    monkeypatch.undo()
    with pytest.raises(ConfigError, match=f"{FILE_NAME} cannot be read"):
        recover(tmp_path / "other", "run")


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_server_starts_on_a_full_disk_and_resumes_what_was_read(
    tmp_path: Path, error: int, caplog: pytest.LogCaptureFixture
) -> None:
    left = crashed_run(tmp_path)
    before = left.path.read_bytes()
    args = SchedulerArgs(journal=str(tmp_path), resume=True)
    with faulty_os() as faulty:
        faulty.fails = lambda name, number: full_disk(name, number) and error
        journal, recovered = open_journal(args, Path("second"), make_header("second"))
        assert outline(recovered) == [("a", 0, [5], False, False)]
        journal.compact()
    assert journal.state == "failed"
    assert os.strerror(error) in caplog.text
    assert "Make room there" in caplog.text
    assert outline(left.recovered()) == outline(recovered), "another run may still resume"
    assert len(left.path.read_bytes()) == len(before)
    release_journal(journal)
    assert recover(tmp_path, "second", is_restart=True, resume=True) == [], "they may have ended"
    assert len(recover(tmp_path, "third", resume=True)) == 1
    with pytest.raises(ConfigError, match="unfinished requests"):
        recover(tmp_path, "third")


def test_a_server_starts_where_no_directory_can_be_made_and_journals_once_it_can(
    tmp_path: Path,
) -> None:
    directory = tmp_path / "new"
    with faulty_os() as faulty:
        faulty.fails = full_disk
        args = SchedulerArgs(journal=str(directory))
        journal, recovered = open_journal(args, Path("run"), make_header())
        journal.compact()
        assert (recovered, journal.state, directory.exists()) == ([], "failed", False)
    assert isinstance(journal, FileJournal)
    journal._clock = lambda: 1e12
    journal.append(StepEvents(acknowledged=[1]))
    journal.commit()
    assert journal.state == "on"
    assert (directory / FILE_NAME).exists()
    release_journal(journal)


def test_each_of_several_replicas_has_a_directory_of_its_own(tmp_path: Path) -> None:
    args = SchedulerArgs(journal=str(tmp_path))
    assert of_replica(args, ReplicaPlace()) == args
    assert of_replica(args, ReplicaPlace(2, 3)).journal == str(tmp_path / "replica-2")
    assert of_replica(SchedulerArgs(), ReplicaPlace(2, 3)) == SchedulerArgs()


def test_a_journal_that_no_replica_would_resume_is_an_error_with_the_number_that_would(
    tmp_path: Path,
) -> None:
    args = SchedulerArgs(journal=str(tmp_path))
    for number in range(3):
        (tmp_path / f"replica-{number}").mkdir()
    crashed_run(tmp_path / "replica-2")
    for count in (1, 2):
        with pytest.raises(ConfigError, match=r"replica-2/journal has 1 unfin.* with --dp 3 and"):
            check_number_of_replicas(args, count)
    check_number_of_replicas(args, 3)
    (tmp_path / "replica-2" / FILE_NAME).unlink()
    crashed_run(tmp_path / "replica-0")
    with pytest.raises(ConfigError, match=r"replica-0/journal has 1 .* with --dp 2 and"):
        check_number_of_replicas(args, 1)
    crashed_run(tmp_path / "replica-2")
    with pytest.raises(ConfigError, match=r"replica-0/journal has 1 .* with --dp 3 and"):
        check_number_of_replicas(args, 1)
    for number in (0, 2):
        (tmp_path / f"replica-{number}" / FILE_NAME).unlink()
    crashed_run(tmp_path)
    check_number_of_replicas(args, 1)
    with pytest.raises(ConfigError, match="has 1 unfinished requests: start with --dp 1 and"):
        check_number_of_replicas(args, 2)
