"""Open the journal when a scheduler starts, and decide which earlier requests it resumes."""

import dataclasses
import errno
import logging
import os
import time
from pathlib import Path
from typing import NamedTuple

from quadriga.config.replica_args import REPLICA_PREFIX, ReplicaPlace, journal_dir
from quadriga.config.scheduler_args import SchedulerArgs
from quadriga.errors import ConfigError
from quadriga.model_files.resolve import ModelFiles
from scheduler_proc.durability.journal import Journal, NoJournal
from scheduler_proc.durability.journal_file import JournalFile
from scheduler_proc.durability.journal_records import JournalHeader, run_tag
from scheduler_proc.durability.journal_recovery import (
    JournalContents,
    RecoveredRequest,
    read_journal,
    renumber,
)

FILE_NAME = "journal"
LOCK_TIMEOUT_S = 2.0  # a scheduler that was killed is gone by then
LOCK_POLL_S = 0.02
# A server starts in spite of these errors, which may pass. Any other error is a mistake in the flag
# or in the permissions.
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EIO)


class OpenedJournal(NamedTuple):
    """A journal, and the requests that an earlier scheduler left in it."""

    journal: Journal | NoJournal
    recovered: list[RecoveredRequest]


def make_header(run_dir: Path, model_name: str, model: ModelFiles) -> JournalHeader:
    """Return the header of a run's journal. model_name: as the user gave it."""
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
    return OpenedJournal(Journal(file), recovered)


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
