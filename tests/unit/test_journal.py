"""What another scheduler finds in the journal: everything that was written whole, and no more."""

import threading
from pathlib import Path
from typing import Any

import pytest

from quadriga.errors import ConfigError
from quadriga.messages.arrays import pack_floats, pack_ids
from quadriga.messages.logprobs import LogprobBlock
from quadriga.messages.public import ErrorInfo
from quadriga.messages.to_scheduler import Submit
from quadriga.sampling import SamplingParams
from quadriga.scheduler_args import SchedulerArgs
from scheduler_proc import journal as journal_module
from scheduler_proc.journal import FILE_NAME, Journal, NoJournal, open_journal
from scheduler_proc.journal_frames import Found, read_journal, restored
from scheduler_proc.request import Request, Status
from scheduler_proc.requests import LiveRequests

EOS = frozenset({2})


class Run:
    """A scheduler's journal, and requests that it tells of."""

    def __init__(self, directory: Path, name: str = "run") -> None:
        self.path = directory / FILE_NAME
        self.journal = Journal(self.path, name, durable=False)
        self.journal.compact()
        self.requests = LiveRequests(EOS)

    def accept(self, name: str, n: int = 1) -> list[Request]:
        params = SamplingParams(max_new_tokens=50, seed=1, n=n, logit_bias={5: 1.0})
        message = Submit(b"c", name, pack_ids([7, 8]), params, True, 1.0, 2.0)
        requests = self.requests.add(message)
        self.journal.accepted(message, requests)
        return requests

    def give(self, request: Request, *tokens: int) -> None:
        for token in tokens:
            request.tokens.append(token)
            request.first_token = request.first_token or 3.0
            self.journal.produced([request.seq], [token], 3.0)

    def end(self, request: Request, reason: str = "stop", settled: bool = True) -> None:
        request.status, request.finish_reason = Status.FINISHED, reason
        self.journal.ended(request)
        if settled:
            self.journal.settled([request.seq])

    def found(self) -> list[Found]:
        return read_journal(self.path).found


def outline(found: list[Found]) -> list[tuple[Any, ...]]:
    return [
        (one.message.request_id, one.index, one.tokens.tolist(), bool(one.ended), one.settled)
        for one in found
    ]


def test_requests_go_on_from_their_last_token_and_ends_are_known(tmp_path: Path) -> None:
    run = Run(tmp_path)
    (a,), (b, c), (d,) = run.accept("a"), run.accept("b", n=2), run.accept("d")
    run.journal.commit()
    run.give(a, 5, 6)
    run.give(b, 9)
    run.journal.commit()
    run.give(c, 4)
    c.matched_stop, c.error = 4, ErrorInfo("failed", "why")
    run.end(c, settled=False)
    run.end(d)
    run.journal.commit()
    found = run.found()
    assert outline(found) == [
        ("a", 0, [5, 6], False, False),
        ("b", 0, [9], False, False),
        ("b", 1, [4], True, False),
        ("d", 0, [], True, True),
    ]
    assert found[0].message.params.logit_bias == {5: 1.0}
    going_on, ended = restored(found[0], EOS), restored(found[2], EOS)
    assert (going_on.tokens.tolist(), going_on.known) == ([7, 8, 5, 6], 4)
    assert (going_on.status, going_on.first_token) == (Status.WAITING, 3.0)
    assert (ended.finish_reason, ended.matched_stop, ended.error) == ("stop", 4, c.error)
    assert ended.params.seed == 2, "each choice has a seed of its own"


def test_log_probabilities_come_back_with_their_tokens(tmp_path: Path) -> None:
    run = Run(tmp_path)
    (request,) = run.accept("a")
    prompt, blocks = [block_of(-3.0)], [block_of(-1.0), block_of(-2.0)]
    request.prompt_logprobs = prompt
    run.journal.told_prompt(request.seq, prompt)
    for token, block in zip((5, 6), blocks, strict=True):
        run.give(request, token)
        request.told.append(block)
        run.journal.told(request.seq, block)
        run.journal.commit()
    for _ in ("as it was written", "and written anew"):
        (found,) = run.found()
        again = restored(found, EOS)
        assert (again.told, again.prompt_logprobs) == (blocks, prompt)
        run.journal.compact()


def block_of(logprob: float) -> LogprobBlock:
    return LogprobBlock(pack_floats([logprob]), 1, pack_ids([3]), pack_floats([-0.5]))


def test_a_torn_tail_loses_whole_rounds_and_nothing_else(tmp_path: Path) -> None:
    run = Run(tmp_path)
    (a,) = run.accept("a")
    sizes = []
    for token in range(3, 20):
        run.give(a, token)
        run.journal.commit()
        sizes.append(run.path.stat().st_size)
    whole = run.path.read_bytes()
    for cut in range(sizes[0], len(whole) + 1):
        run.path.write_bytes(whole[:cut])
        rounds = sum(size <= cut for size in sizes)
        assert run.found()[0].tokens.tolist() == list(range(3, 3 + rounds))
    for garbage in (b"\x00" * 100, b"\xc1", b"\x93\x01\x02", b"\xff" * 9):
        run.path.write_bytes(whole + garbage)
        assert len(run.found()[0].tokens) == len(sizes)


def test_a_file_that_has_grown_is_written_anew_with_what_still_matters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "COMPACT_AT", 20_000)
    monkeypatch.setattr(journal_module, "MOST_ENDED", 10)
    run = Run(tmp_path)
    (long,) = run.accept("long")
    (late,) = run.accept("late")
    run.end(late, settled=False)
    biggest = 0
    for number in range(2000):
        (one,) = run.accept(f"r{number}")
        run.give(one, 5)
        run.give(long, 6)
        run.end(one)
        run.journal.commit()
        biggest = max(biggest, run.path.stat().st_size)
    assert biggest < 60_000
    found = run.found()
    assert outline(found)[:2] == [
        ("long", 0, [6] * 2000, False, False),
        ("late", 0, [], True, False),
    ]
    assert outline(found)[-1] == ("r1999", 0, [5], True, True)
    run.journal.compact()
    assert len(run.found()) == 12
    assert outline(run.found())[:2] == outline(found)[:2]


def test_an_end_that_is_handed_on_twice_counts_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "MOST_ENDED", 2)
    run = Run(tmp_path)
    for name in "abcd":
        (request,) = run.accept(name)
        run.end(request)
        run.journal.settled([request.seq])
    run.journal.compact()
    assert [one.message.request_id for one in run.found()] == ["c", "d"]


def test_a_choice_that_was_forgotten_does_not_come_back_with_its_siblings(tmp_path: Path) -> None:
    run = Run(tmp_path)
    requests = run.accept("a", n=3)
    del run.journal._kept[requests[1].seq]
    run.journal.compact()
    assert [one.index for one in run.found()] == [0, 2]


def test_what_an_earlier_run_left_is_taken_up_only_on_demand_and_never_lost_in_silence(
    tmp_path: Path,
) -> None:
    def opened(run: str, **flags: Any) -> list[Found]:
        args = SchedulerArgs(journal=str(tmp_path), **flags)
        return open_journal(args, Path(run)).found

    run = Run(tmp_path, "first")
    run.accept("a")
    run.journal.commit()
    assert outline(opened("first")) == [("a", 0, [], False, False)], "the same run goes on"
    assert len(opened("second", resume=True)) == 1
    with pytest.raises(ConfigError, match="has 1 unfinished requests of an earlier run: add"):
        opened("second")
    (request,) = run.requests
    run.end(request)
    run.journal.commit()
    assert opened("second") == []
    run.journal.close()
    assert not run.path.exists()
    assert opened("second") == []
    assert isinstance(open_journal(SchedulerArgs(no_journal=True), tmp_path).journal, NoJournal)


def test_a_file_that_is_no_journal_is_named(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_bytes(b"\x01\x02")
    with pytest.raises(ConfigError, match="is no journal"):
        open_journal(SchedulerArgs(journal=str(tmp_path)), Path("run"))


def test_a_full_disk_ends_the_journal_and_not_the_server(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path)

    def full(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("scheduler_proc.journal.os.write", full)
    for name in "ab":
        run.accept(name)
        run.journal.commit()
    assert caplog.text.count("No space left on device") == 1


def test_a_journal_that_outlives_its_run_is_synced_by_a_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "SYNC_EVERY", 0.0)
    synced = threading.Semaphore(0)
    monkeypatch.setattr("scheduler_proc.journal.os.fdatasync", lambda _: synced.release())
    run = Run(tmp_path)
    run.journal = Journal(run.path, "run", durable=True)
    run.journal.compact()
    assert synced.acquire(timeout=0), "a new file, at once"
    for name in "ab":
        run.accept(name)
        run.journal.commit()
        assert synced.acquire(timeout=10)
    run.journal.close()
    run.journal._syncer.written()  # type: ignore[union-attr]


def test_resuming_needs_to_know_what() -> None:
    for flags in ({"resume": True}, {"no_journal": True, "journal": "x"}):
        with pytest.raises(ConfigError, match="journal"):
            SchedulerArgs(**flags).validate()
