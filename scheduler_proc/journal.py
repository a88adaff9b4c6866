"""What was accepted, what came of it: on disk, so that another scheduler can go on with it.

One file of msgpack frames, appended to after each round of the scheduler, when the worker has its
plan. A frame has all of its round, so that a tail torn off by a crash loses whole rounds: what they
gave is computed again, and is the same. The system's cache holds what was written however the
process ends; against a loss of power a file that is meant to outlive its run (--journal) is also
synced, once a second.

A file that has grown is written anew with what still matters: requests that go on, and the last
ones that ended, for clients whose connection was lost.
"""

import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from itertools import chain, groupby
from pathlib import Path
from typing import NamedTuple

from quadriga.errors import ConfigError
from quadriga.messages.arrays import pack_ids
from quadriga.messages.logprobs import LogprobBlock
from quadriga.messages.to_scheduler import Submit
from quadriga.scheduler_args import SchedulerArgs
from quadriga.sockets import encode
from scheduler_proc.journal_frames import (
    Accepted,
    Found,
    Round,
    Tokens,
    Told,
    ended_of,
    read_journal,
)
from scheduler_proc.request import Request

FILE_NAME = "journal"
COMPACT_AT = 16 * 1024 * 1024
"""Bytes from which on a file is written anew, if that makes it a quarter."""
MOST_ENDED = 1024
MOST_ENDED_TOKENS = 1 << 20
"""Ended requests that stay, and their tokens."""
SYNC_EVERY = 1.0
"""Seconds."""


class Kept(NamedTuple):
    """A request that stays in the journal: as it came, and as it is."""

    message: Submit
    request: Request


class Journal:
    """Writes. What is told between two commits becomes one frame. Nothing is written before the
    first `compact`, which takes the place of what was there.

    run: names the run that writes. durable: the file is synced.
    """

    def __init__(self, path: Path, run: str, durable: bool) -> None:
        self._path = path
        self._run = run
        self._kept: dict[int, Kept] = {}
        self._ended: OrderedDict[int, None] = OrderedDict()
        self._ended_tokens = 0
        self._round = Round()
        self._size = 0
        self._compact_at = COMPACT_AT
        self._file = -1
        self._syncer = Syncer() if durable else None

    # --- what happens -----------------------------------------------------------------------------

    def accepted(self, message: Submit, requests: list[Request]) -> None:
        """Its choices have numbers that follow each other."""
        if requests:
            indexes = [request.index for request in requests]
            self._round.accepted.append(Accepted(requests[0].seq, message, indexes))
            self.keep(message, requests)

    def keep(self, message: Submit, requests: Iterable[Request]) -> None:
        """These are in the journal, and stay there."""
        for request in requests:
            self._kept[request.seq] = Kept(message, request)

    def produced(self, seqs: list[int], tokens: list[int], time: float) -> None:
        """The tokens of a step, which ended at `time` (Unix seconds)."""
        if seqs:
            self._round.tokens.append(Tokens(seqs, pack_ids(tokens), time))

    def told(self, seq: int, logprobs: LogprobBlock) -> None:
        """The log-probability of the last token of a request, once that is produced."""
        self._round.told.append(Told(seq, [logprobs]))

    def told_prompt(self, seq: int, logprobs: list[LogprobBlock]) -> None:
        """Those of all of its prompt."""
        self._round.told.append(Told(seq, [], list(logprobs)))

    def ended(self, request: Request) -> None:
        """Its reason is set."""
        self._round.ended.append(ended_of(request))

    def settled(self, seqs: list[int]) -> None:
        """The ends of these were handed on."""
        self._round.settled += seqs
        for seq in seqs:
            # An end that was told again is handed on again.
            if seq in self._kept and seq not in self._ended:
                self._ended[seq] = None
                self._ended_tokens += self._kept[seq].request.size
        while len(self._ended) > MOST_ENDED or self._ended_tokens > MOST_ENDED_TOKENS:
            seq, _ = self._ended.popitem(last=False)
            kept = self._kept.pop(seq)
            self._ended_tokens -= kept.request.size

    # --- the file ---------------------------------------------------------------------------------

    def commit(self) -> None:
        """Write what was told since the last time."""
        if self._round.is_empty:
            return
        frame, self._round = encode(self._round), Round()
        if self._file < 0:
            return
        try:
            os.write(self._file, frame)
            self._size += len(frame)
            if self._size > self._compact_at:
                self.compact()
        except OSError as error:
            self._give_up(error)
        if self._syncer is not None:
            self._syncer.written()

    def compact(self) -> None:
        """Write the file anew, with what still matters. Raises OSError."""
        self._start_file(map(encode, self._snapshot()))
        self._compact_at = max(COMPACT_AT, 4 * self._size)

    def _snapshot(self) -> Iterator[Round]:
        """A round for each message: all in one would leave holes of its size in the heap."""
        by_number = sorted(self._kept.items())
        for first, kept in groupby(by_number, lambda one: one[0] - one[1].request.index):
            everything = Round()
            for seq, (message, request) in kept:
                if not everything.accepted:
                    everything.accepted.append(Accepted(first, message, []))
                everything.accepted[0].indexes.append(request.index)
                generated = request.tokens[request.num_prompt :]
                if generated:
                    seqs = [seq] * len(generated)
                    everything.tokens.append(Tokens(seqs, pack_ids(generated), request.first_token))
                if request.told or (request.first_token and request.prompt_logprobs):
                    everything.told.append(Told(seq, request.told, request.prompt_logprobs))
                if request.finished:
                    everything.ended.append(ended_of(request))
                if seq in self._ended:
                    everything.settled.append(seq)
            yield everything

    def _start_file(self, frames: Iterable[bytes]) -> None:
        """A new file takes the old one's place once it is whole."""
        fresh = self._path.with_suffix(".new")
        file = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
        with os.fdopen(os.dup(file), "wb") as writer:
            size = sum(map(writer.write, chain([encode(self._run)], frames)))
        if self._syncer is not None:
            self._syncer.watch(file)
            os.fdatasync(file)
        os.replace(fresh, self._path)
        if self._syncer is not None:
            _sync_directory(self._path.parent)
        if self._file >= 0:
            os.close(self._file)
        self._file, self._size = file, size

    def _give_up(self, error: OSError) -> None:
        logging.error(
            "the journal %s cannot be written (%s): requests that are accepted from now on do not"
            " survive the end of the scheduler",
            self._path,
            error,
        )
        self._close_file()

    def close(self) -> None:
        """Every request has ended, and nobody needs the file any more."""
        if self._file >= 0:
            self._close_file()
        self._path.unlink(missing_ok=True)

    def _close_file(self) -> None:
        if self._syncer is not None:
            self._syncer.watch(-1)
        os.close(self._file)
        self._file = -1


def _sync_directory(directory: Path) -> None:
    """So that a new name in it outlasts a loss of power, too."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class NoJournal:
    """Remembers nothing: for tests, the simulator, and --no-journal."""

    def accepted(self, message: Submit, requests: list[Request]) -> None: ...

    def keep(self, message: Submit, requests: Iterable[Request]) -> None: ...

    def produced(self, seqs: list[int], tokens: list[int], time: float) -> None: ...

    def told(self, seq: int, logprobs: LogprobBlock) -> None: ...

    def told_prompt(self, seq: int, logprobs: list[LogprobBlock]) -> None: ...

    def ended(self, request: Request) -> None: ...

    def settled(self, seqs: list[int]) -> None: ...

    def compact(self) -> None: ...

    def commit(self) -> None: ...

    def close(self) -> None: ...


class Opened(NamedTuple):
    """A journal, and what an earlier scheduler left in it."""

    journal: Journal | NoJournal
    found: list[Found]


def open_journal(args: SchedulerArgs, run_dir: Path) -> Opened:
    """The journal of a run. Raises ConfigError where an earlier run has left requests that nobody
    said what to do with."""
    if args.no_journal:
        return Opened(NoJournal(), [])
    directory = Path(args.journal) if args.journal else run_dir
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = directory / FILE_NAME
    contents = read_journal(path)
    goes_on = args.resume or contents.run == run_dir.name
    if contents.unfinished and not goes_on:
        raise ConfigError(
            f"{path} has {contents.unfinished} unfinished requests of an earlier run: add --resume"
            " to finish them, or remove the file"
        )
    journal = Journal(path, run_dir.name, durable=bool(args.journal))
    return Opened(journal, contents.found if goes_on else [])


NO_JOURNAL = NoJournal()


class Syncer:
    """Makes what was written outlast a loss of power, in a thread, at most once a second."""

    def __init__(self) -> None:
        self._file = -1
        self._dirty = threading.Event()
        self._lock = threading.Lock()
        threading.Thread(target=self._run, name="journal-sync", daemon=True).start()

    def watch(self, file: int) -> None:
        """From now on it is this file; -1: none."""
        with self._lock:
            self._file = file

    def written(self) -> None:
        self._dirty.set()

    def _run(self) -> None:
        while True:
            self._dirty.wait()
            self._dirty.clear()
            with self._lock:
                file = os.dup(self._file) if self._file >= 0 else -1
            if file >= 0:
                self._sync(file)
            time.sleep(SYNC_EVERY)

    def _sync(self, file: int) -> None:
        try:
            os.fdatasync(file)
        except OSError as error:
            logging.error("the journal cannot be synced: %s", error)
        finally:
            os.close(file)
