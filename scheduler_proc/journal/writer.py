"""The journal: accepted requests and their tokens on disk, for a scheduler that takes over.

`FileJournal` writes it; `open_journal` opens it when a scheduler starts, and decides which earlier
requests are resumed.
"""

import dataclasses
import errno
import logging
import os
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import NamedTuple, Protocol

from quadriga.errors import ConfigError
from quadriga.server.config.engine_args import (
    REPLICA_PREFIX,
    ReplicaPlace,
    SchedulerArgs,
    journal_dir,
)
from quadriga.server.models.resolve import ModelFiles
from quadriga.wire import packing, sockets, to_scheduler
from scheduler_proc.journal.events import StepEvents
from scheduler_proc.journal.file import (
    AcceptedRecord,
    JournalFile,
    JournalHeader,
    JournalRecord,
    LogprobRecord,
    TokenRecord,
    ended_record,
    run_tag,
    vector_record,
)
from scheduler_proc.journal.recovery import (
    JournalContents,
    RecoveredRequest,
    read_journal,
    renumber,
)
from scheduler_proc.state.request import Request

# The journal: accepted requests and their tokens on disk, for a scheduler that takes over.
#
# It is one file of frames (journal/file.py), appended to after each step of the scheduler,
# when the worker has its plan. A frame holds everything of its step, so that a crash loses whole
# steps: their tokens are computed again, and are the same. The system's page cache keeps what was
# written however the process ends. A file that outlives its run (--journal) is also synced, once
# a second.
#
# A file that has grown is compacted: rewritten with the open requests, and the last ones that
# ended, for clients that reconnect. A file that could not be written is rewritten as soon as it
# can be; until then the server goes on without it.

COMPACT_BYTES = 16 * 1024 * 1024  # a larger file is compacted once it has grown fourfold
MAX_ENDED = 1024  # ended requests that stay
MAX_ENDED_TOKENS = 1 << 20
RETRY_INTERVAL_S = 10.0
ON, OFF, FAILED = "on", "off", "failed"  # states of a journal, as the server's info has them


class JournaledRequest(NamedTuple):
    """A request that stays in the journal: as it was submitted, as it is, and what computes it."""

    message: to_scheduler.Submit
    request: Request
    kernels: str


class Journal(Protocol):
    """Where a scheduler notes what happens to requests. No method raises an error of a disk."""

    @property
    def state(self) -> str:
        """ON, OFF, or FAILED while nothing can be written."""

    def append(self, events: StepEvents) -> None:
        """Note what happened in a step."""

    def keep(
        self,
        message: to_scheduler.Submit,
        requests: Iterable[Request],
        acknowledged: bool,
        kernels: str,
    ) -> None:
        """Keep requests of an earlier scheduler, with the next `compact`.

        Args:
            message: as they were submitted.
            requests: as they are.
            acknowledged: their ends have reached the frontend.
            kernels: what computed their tokens.
        """

    def set_kernels(self, kernels: str) -> None:
        """Note what computes tokens from now on."""

    def commit(self) -> None:
        """Write what was noted since the last call."""

    def compact(self) -> None:
        """Write the requests that are kept, in place of all that was written before."""

    def close(self) -> None:
        """End the journal of a server that stops."""


class NoJournal:
    """A journal that keeps nothing: for tests, the simulator, and --no-journal."""

    state = OFF

    def append(self, events: StepEvents) -> None:
        """Do nothing."""

    def keep(
        self,
        message: to_scheduler.Submit,
        requests: Iterable[Request],
        acknowledged: bool,
        kernels: str,
    ) -> None:
        """Do nothing."""

    def set_kernels(self, kernels: str) -> None:
        """Do nothing."""

    def commit(self) -> None:
        """Do nothing."""

    def compact(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


class FileJournal:
    """Write the journal. What is appended between two commits becomes one frame.

    Nothing is written before the first `compact`, which replaces an earlier file. No failure of
    the disk reaches the caller.

    Attributes:
        state: ON, or FAILED while the file cannot be written.
    """

    def __init__(self, file: JournalFile, clock: Callable[[], float] = time.monotonic) -> None:
        """Initialize. clock: seconds that never jump."""
        self.state = ON
        self._file = file
        self._clock = clock
        self._retry_at = 0.0
        self._kept: dict[int, JournaledRequest] = {}
        self._ended: OrderedDict[int, None] = OrderedDict()
        self._ended_tokens = 0
        self._kernels = ""
        self._record = JournalRecord()
        self._compact_at = COMPACT_BYTES

    # --- what happens -----------------------------------------------------------------------------

    def set_kernels(self, kernels: str) -> None:
        """Note what computes from now on, as in WorkerReady."""
        self._kernels = self._record.kernels = kernels

    def append(self, events: StepEvents) -> None:
        """Take in what happened, for the next frame."""
        record = self._record
        for message, requests in events.accepted:
            indexes = [request.index for request in requests]
            first_seq = requests[0].seq - requests[0].index
            record.accepted.append(AcceptedRecord.of(first_seq, message, indexes))
            self.keep(message, requests)
        if events.seqs:
            token_ids = packing.pack_ids(events.token_ids)
            record.tokens.append(TokenRecord(events.seqs, token_ids, events.time))
        for request in events.started:
            if request.prompt_logprobs:
                record.logprobs.append(
                    LogprobRecord(request.seq, [], list(request.prompt_logprobs))
                )
        for request in events.logprob_requests:
            record.logprobs.append(LogprobRecord(request.seq, [request.logprobs[-1]]))
        record.logprobs += map(vector_record, _with_kept_vector(events.finished))
        record.ended += map(ended_record, _kept_ends(events.finished))
        self._end_vectors(events.acknowledged)
        record.acknowledged += events.acknowledged
        self._acknowledge(events.acknowledged)

    def _end_vectors(self, seqs: list[int]) -> None:
        """Note the ends of requests whose vectors are not kept, and forget these requests.

        The frontend has the vectors. Until then such a request is open in the journal: the next
        scheduler computes it again, with the same bits.
        """
        for seq in seqs:
            kept = self._kept.get(seq)
            if kept is not None and not _has_kept_end(kept.request):
                self._record.ended.append(ended_record(kept.request))
                del self._kept[seq]

    def keep(
        self,
        message: to_scheduler.Submit,
        requests: Iterable[Request],
        acknowledged: bool = False,
        kernels: str = "",
    ) -> None:
        """Keep requests in every compacted file from now on.

        Args:
            message: as it was submitted.
            requests: its choices.
            acknowledged: they have ended, and their clients have the ends.
            kernels: what computed them before; "": what computes now.
        """
        message = message.begun()  # the request has its tokens from here on
        for request in requests:
            self._kept[request.seq] = JournaledRequest(message, request, kernels)
            if acknowledged:
                self._record.acknowledged.append(request.seq)
                self._acknowledge([request.seq])

    def _acknowledge(self, seqs: list[int]) -> None:
        """Keep the last acknowledged requests only."""
        for seq in seqs:
            # An end that was replayed is acknowledged again.
            if seq in self._kept and seq not in self._ended:
                self._ended[seq] = None
                self._ended_tokens += self._kept[seq].request.size
        while len(self._ended) > MAX_ENDED or self._ended_tokens > MAX_ENDED_TOKENS:
            seq, _ = self._ended.popitem(last=False)
            self._ended_tokens -= self._kept.pop(seq).request.size

    # --- the file ---------------------------------------------------------------------------------

    def commit(self) -> None:
        """Write what was appended since the last commit."""
        if self._record.is_empty:
            return
        record, self._record = self._record, JournalRecord()
        if self.state == FAILED:
            if self._clock() >= self._retry_at:
                self.compact()
            return
        try:
            self._file.append(sockets.encode(record))
        except OSError as error:
            self._give_up(error)
        else:
            if self._file.size > self._compact_at:
                self.compact()

    def compact(self) -> None:
        """Rewrite the file with the requests that are kept."""
        try:
            self._file.rewrite(map(sockets.encode, self._snapshot()))
        except OSError as error:
            self._give_up(error)
            return
        self._compact_at = max(COMPACT_BYTES, 4 * self._file.size)
        if self.state == FAILED:
            self.state = ON
            logging.warning("the journal %s is written again, with all requests", self._file.path)

    def _give_up(self, error: OSError) -> None:
        """Go on without a file until it can be written."""
        self._file.give_up()
        self._retry_at = self._clock() + RETRY_INTERVAL_S
        if self.state == FAILED:
            return
        self.state = FAILED
        logging.error(
            "the journal %s cannot be written (%s): until it can, only the frontend and the"
            " clients know the open requests if the scheduler ends. Make room there, or restart"
            " with another --journal; it is tried again every %g s",
            self._file.path,
            error,
            RETRY_INTERVAL_S,
        )

    def close(self) -> None:
        """Every request has ended: the file is not needed any more."""
        try:
            self._file.remove()
        except OSError as error:
            logging.error("%s cannot be removed (%s): remove it", self._file.path, error)

    def _snapshot(self) -> Iterator[JournalRecord]:
        """Yield a record for each message: one for all would leave holes in the heap."""
        by_seq = sorted(self._kept.items())
        kernels = ""
        for first_seq, choices in groupby(by_seq, lambda item: item[0] - item[1].request.index):
            record = JournalRecord()
            for seq, (message, request, computed_by) in choices:
                if (computed_by or self._kernels) != kernels:
                    record.kernels = kernels = computed_by or self._kernels
                if not record.accepted:
                    record.accepted.append(AcceptedRecord.of(first_seq, message, []))
                record.accepted[0].indexes.append(request.index)
                if generated := request.generated[len(request.given_ids) :]:
                    seqs, token_ids = [seq] * len(generated), packing.pack_ids(generated)
                    record.tokens.append(TokenRecord(seqs, token_ids, request.first_token_at))
                if request.logprobs or (request.first_token_at and request.prompt_logprobs):
                    record.logprobs.append(
                        LogprobRecord(seq, request.logprobs, request.prompt_logprobs)
                    )
                record.logprobs += map(vector_record, _with_kept_vector([request]))
                record.ended += map(ended_record, _kept_ends([request]))
                if seq in self._ended:
                    record.acknowledged.append(seq)
            yield record
        if self._kernels and kernels != self._kernels:
            yield JournalRecord(kernels=self._kernels)


def _has_kept_end(request: Request) -> bool:
    """Return whether the end of a request is noted at once: its vector, if any, is noted, too."""
    return request.vector is None or request.has_kept_vector


def _kept_ends(requests: Iterable[Request]) -> list[Request]:
    """Return the requests that have ended, but for those whose vectors are not kept."""
    return [request for request in requests if request.finished and _has_kept_end(request)]


def _with_kept_vector(requests: Iterable[Request]) -> list[Request]:
    """Return the requests whose vectors the journal has."""
    return [request for request in requests if request.vector and request.has_kept_vector]


# Open the journal when a scheduler starts, and decide which earlier requests it resumes.

FILE_NAME = "journal"
LOCK_TIMEOUT_S = 2.0  # a scheduler that was killed is gone by then
LOCK_POLL_S = 0.02
# A server starts in spite of these errors, which may pass. Any other error is a mistake in the flag
# or in the permissions.
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EIO)


class OpenedJournal(NamedTuple):
    """A journal, and the requests that an earlier scheduler left in it."""

    journal: Journal
    recovered: list[RecoveredRequest]


def make_header(run_dir: Path, model_name: str, model: ModelFiles) -> JournalHeader:
    """Return the header of a run's journal. model_name: its name, or its path."""
    return JournalHeader(
        run_dir.name, model_name, model.fingerprint, model.vocab_size, model.context_length
    )


def open_journal(
    args: SchedulerArgs, run_dir: Path, header: JournalHeader, is_restart: bool = False
) -> OpenedJournal:
    """Open the journal of a run.

    Args:
        args: whether there is one, where, and whether requests of an earlier run are resumed.
        run_dir: default directory of the journal.
        header: header of this run.
        is_restart: an earlier scheduler of this run has died. The frontend sends its open requests
            again, so the server goes on even without those of the journal.

    Raises:
        ConfigError: the directory cannot be used, another server has it, or it has unfinished
            requests of an earlier run that this one cannot resume, or was not started to resume.
    """
    if args.no_journal:
        return OpenedJournal(NoJournal(), [])
    directory = Path(args.journal) if args.journal else run_dir
    file = JournalFile(directory / FILE_NAME, header, durable=bool(args.journal))
    try:
        _lock_directory(file)
        recovered = _recover(file, args.resume)
    except ConfigError as error:
        if not is_restart:
            file.release()
            raise
        logging.error("%s. The open requests are computed again.", error)
        recovered = []
    return OpenedJournal(FileJournal(file), recovered)


def of_replica(args: SchedulerArgs, replica: ReplicaPlace) -> SchedulerArgs:
    """Return the flags of one replica: among several, each has its journal in a subdirectory."""
    if replica.num_replicas == 1 or not args.journal:
        return args
    return dataclasses.replace(args, journal=str(journal_dir(args.journal, replica.number)))


def check_number_of_replicas(args: SchedulerArgs, count: int) -> None:
    """Raise ConfigError where a journal is left that no replica of this server would resume."""
    if not args.journal:
        return
    directory = Path(args.journal)
    fits = {directory} if count == 1 else {journal_dir(args.journal, n) for n in range(count)}
    others = {path.parent for path in directory.glob(f"{REPLICA_PREFIX}*/{FILE_NAME}")} | {
        directory
    }
    counts = {other: _num_unfinished(other) for other in sorted(others - fits)}
    unfinished = [other for other, number in counts.items() if number]
    if unfinished:
        other = unfinished[0]
        wanted = 1 if other == directory else max(map(_num_replicas_with, unfinished))
        raise ConfigError(
            f"{other / FILE_NAME} has {counts[other]} unfinished requests: start with --dp"
            f" {wanted} and --resume to finish them, or remove the file"
        )


def _num_unfinished(directory: Path) -> int:
    """Return how many requests of the journal in a directory have no end; 0 without a journal."""
    try:
        return read_journal(directory / FILE_NAME).num_unfinished
    except OSError:
        return 0


def _num_replicas_with(directory: Path) -> int:
    """Return the smallest number of replicas that have a journal in this subdirectory.

    It is at least 2: a single replica has its journal in no subdirectory.
    """
    number = directory.name.removeprefix(REPLICA_PREFIX)
    return max(int(number) + 1, 2) if number.isdecimal() else 2


def _lock_directory(file: JournalFile) -> None:
    directory, deadline = file.path.parent, time.monotonic() + LOCK_TIMEOUT_S
    while True:
        try:
            file.lock_directory()
            break
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise ConfigError(
                    f"--journal {directory} is the journal of another server that runs: stop that"
                    " server, or choose another directory"
                ) from None
            time.sleep(LOCK_POLL_S)
        except OSError as error:
            if error.errno in DISK_ERRORS:
                return  # the first write reports it
            raise _unusable(directory, str(error.strerror)) from None
    if not os.access(directory, os.R_OK | os.W_OK | os.X_OK):
        raise _unusable(directory, "it cannot be read and written")


def _unusable(directory: Path, why: str) -> ConfigError:
    return ConfigError(
        f"--journal {directory} cannot be used ({why}): choose a directory that this user may"
        " create and write to"
    )


def _recover(file: JournalFile, resume: bool) -> list[RecoveredRequest]:
    """Return the requests of the present file that this run resumes.

    Raises:
        ConfigError: the present file must not be replaced.
    """
    path, header = file.path, file.header
    try:
        contents = read_journal(path)
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read ({error.strerror}), and may have unfinished requests: make it"
            " readable, remove it, or choose another --journal"
        ) from None
    earlier = contents.header
    if earlier is None and contents.num_unread_bytes:
        raise ConfigError(
            f"{path} is no journal that this version can read, or its beginning is damaged: remove"
            " it, finish its requests with the version that wrote it, or choose another --journal"
        )
    if earlier is None or contents.given_up_by == run_tag(header.run):
        return []
    if earlier.run == header.run:
        return contents.requests
    difference = _difference(earlier, header)
    _check_earlier_run(path, contents, difference, resume)
    if not resume or difference:
        return []
    renumber(contents.requests)
    return contents.requests


def _check_earlier_run(
    path: Path, contents: JournalContents, difference: str, resume: bool
) -> None:
    """Raise ConfigError where the journal of an earlier run must not be replaced."""
    unfinished = contents.num_unfinished
    if unfinished and difference:
        raise ConfigError(
            f"{path} has {unfinished} unfinished requests of another model: {difference}. Start"
            " the server with that model and --resume to finish them, or remove the file"
        )
    if unfinished and not resume:
        raise ConfigError(
            f"{path} has {unfinished} unfinished requests of an earlier run: add --resume"
            " to finish them, or remove the file"
        )
    if contents.num_unread_bytes and not resume:
        raise ConfigError(
            f"{path} is damaged: {contents.num_unread_bytes} bytes cannot be read, and may have"
            " unfinished requests: add --resume to go on with what can be read, or remove the file"
        )


def _difference(earlier: JournalHeader, header: JournalHeader) -> str:
    """Return why requests of the earlier run cannot go on; "" if they can."""
    if earlier.vocab_size != header.vocab_size:
        return (
            f"{earlier.model} with a vocabulary of {earlier.vocab_size}, and this server's"
            f" {header.model} has {header.vocab_size}"
        )
    if earlier.fingerprint != header.fingerprint:
        return (
            f"{earlier.model} (fingerprint {earlier.fingerprint}), and this server's is"
            f" {header.model} ({header.fingerprint})"
        )
    if earlier.context_length > header.context_length:
        return (
            f"{earlier.model} with a context of {earlier.context_length} tokens, and this server's"
            f" is {header.context_length}"
        )
    return ""
