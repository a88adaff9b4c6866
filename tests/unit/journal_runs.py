"""Journals for tests: a scheduler that writes one, its end, and disks that fail."""

import dataclasses
import errno
import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from quadriga import disk
from quadriga.sampling.params import SamplingParams
from quadriga.server.config.engine_args import SchedulerArgs
from quadriga.wire.logprobs import LogprobBlock
from quadriga.wire.packing import pack_ids
from quadriga.wire.to_scheduler import DetokReady, Submit
from scheduler_proc.journal import file as journal_file
from scheduler_proc.journal.events import StepEvents
from scheduler_proc.journal.file import JournalFile, JournalHeader
from scheduler_proc.journal.recovery import RecoveredRequest, read_journal
from scheduler_proc.journal.writer import FILE_NAME, FileJournal, Journal, NoJournal, open_journal
from scheduler_proc.request_table import RequestTable, first_seq_after_restart
from scheduler_proc.scheduler import Scheduler
from scheduler_proc.state.request import FinishReason, Request
from tests.unit.simulation import World

EOS = frozenset({2})


def make_header(run: str = "run", **fields: Any) -> JournalHeader:
    return msgspec.structs.replace(JournalHeader(run, "tiny", "f1", 100, 64), **fields)


def release_journal(journal: Journal) -> None:
    """Close the files and free the lock, as the system does for a process that has died."""
    if isinstance(journal, FileJournal):
        journal._file.release()


class Run:
    """A scheduler's journal, and the requests that are written to it."""

    def __init__(self, directory: Path, name: str = "run", durable: bool = False) -> None:
        self.path = directory / FILE_NAME
        self.now = 0.0
        file = JournalFile(self.path, make_header(name), durable)
        self.journal = FileJournal(file, lambda: self.now)
        self.journal.compact()
        self.requests = RequestTable(EOS)

    def accept(self, name: str, n: int = 1) -> list[Request]:
        params = SamplingParams(max_new_tokens=5000, seed=1, n=n, logit_bias={5: 1.0})
        message = Submit(b"c", name, pack_ids([7, 8]), params, True, 1.0, 2.0)
        requests = self.requests.add(message)
        self.journal.append(StepEvents(accepted=[(message, requests)]))
        return requests

    def generate(self, request: Request, *tokens: int) -> None:
        for token in tokens:
            request.tokens.append(token)
            request.first_token_at = request.first_token_at or 3.0
            self.journal.append(StepEvents(seqs=[request.seq], token_ids=[token], time=3.0))

    def add_logprobs(self, request: Request, block: LogprobBlock) -> None:
        request.logprobs.append(block)
        self.journal.append(StepEvents(logprob_requests=[request]))

    def finish(self, request: Request, reason: str = "stop", acknowledged: bool = True) -> None:
        request.finish(FinishReason(reason), request.matched_stop, request.error)
        self.journal.append(StepEvents(finished=[request]))
        if acknowledged:
            self.acknowledge(request)

    def acknowledge(self, request: Request) -> None:
        self.journal.append(StepEvents(acknowledged=[request.seq]))

    def recovered(self) -> list[RecoveredRequest]:
        return read_journal(self.path).requests


def outline(recovered: list[RecoveredRequest]) -> list[tuple[Any, ...]]:
    return [
        (
            request.message.request_id,
            request.index,
            request.tokens.tolist(),
            bool(request.ended),
            request.acknowledged,
        )
        for request in recovered
    ]


class FaultyOs:
    """The `os` of journal_file.py and disk.py, with calls that fail.

    Attributes:
        fails: returns the errno to raise, or 0, for the name of a call and the number of calls of
            this name. A write may fail after half of its bytes.
        calls: number of calls by name.
        is_short: whether a write takes half of its bytes only.
    """

    FALLIBLE = ("open", "write", "replace", "fdatasync", "fsync", "ftruncate", "pwrite", "unlink",
                "mkdir", "dup", "close")  # fmt: skip

    def __init__(self) -> None:
        self.fails: Callable[[str, int], int] = lambda _name, _number: 0
        self.calls: Counter[str] = Counter()
        self.is_short = False

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        if name not in self.FALLIBLE:
            return real

        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls[name] += 1
            error = self.fails(name, self.calls[name])
            if name == "write" and (error or self.is_short):
                fd, data = args
                written = os.write(fd, data[: max(1, len(data) // 2)])
                if not error:
                    return written
            if name == "close":
                real(*args, **kwargs)  # the system closes a file even where it says EIO
            if error:
                raise OSError(error, os.strerror(error))
            return None if name == "close" else real(*args, **kwargs)

        return call


@contextmanager
def faulty_os() -> Iterator[FaultyOs]:
    faulty = FaultyOs()
    with pytest.MonkeyPatch.context() as patch:
        for module in (journal_file, disk):
            patch.setattr(module, "os", faulty)
        yield faulty


def full_disk(name: str, _number: int) -> int:
    """Fail every call that needs space on the disk."""
    return errno.ENOSPC if name in ("write", "mkdir", "fdatasync", "fsync") else 0


class MortalWorld(World):
    """A world whose scheduler can crash and be restarted."""

    def __init__(self, args: SchedulerArgs, directory: Path) -> None:
        super().__init__(args)
        self._args = dataclasses.replace(args, journal=str(directory))
        self.journal: Journal = NoJournal()
        self._start_scheduler(is_restart=False)

    def restart_scheduler(self) -> None:
        """Crash the scheduler and start another one; worker and detokenizer forget everything."""
        self._start_scheduler(is_restart=True)

    def _start_scheduler(self, is_restart: bool) -> None:
        self._detok_sessions += 1
        release_journal(self.journal)
        header = make_header(vocab_size=1000, context_length=1000)
        journal, recovered = open_journal(self._args, Path("run"), header, is_restart)
        if isinstance(journal, FileJournal):
            journal._clock = lambda: self.worker.now
        self.journal = journal
        self.scheduler = Scheduler(
            self._args, EOS, self.worker, self.detok, lambda: self.worker.now, journal
        )
        self.scheduler.lifecycle.restore(recovered, first_seq_after_restart() if is_restart else 0)
        self.worker.restart()
        self.detok.session = self._detok_sessions
        self.detok.open.clear()
        self.detok.ended.clear()
        ready = msgspec.structs.replace(self._ready, session=self.worker.session)
        self.scheduler.step([DetokReady(self.detok.session)], [ready])
        self._acknowledge()
        self._check()
