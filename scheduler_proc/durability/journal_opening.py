"""Opens the journal at the start of a scheduler, and decides what of an earlier one it takes up."""

import errno
import logging
import os
import time
from pathlib import Path
from typing import NamedTuple

from quadriga.config.scheduler_args import SchedulerArgs
from quadriga.errors import ConfigError
from quadriga.model_files.resolve import ModelFiles
from scheduler_proc.durability.journal import Journal, NoJournal
from scheduler_proc.durability.journal_file import JournalFile
from scheduler_proc.durability.journal_reader import Contents, read_journal
from scheduler_proc.durability.journal_records import JournalHeader, tag
from scheduler_proc.durability.journal_recovery import RecoveredRequest, renumber

FILE_NAME = "journal"
LOCK_TIMEOUT_S = 2.0
"""For a scheduler that was killed, or whose server was, to be gone."""
LOCK_POLL_S = 0.02
TROUBLES_OF_DISKS = (errno.ENOSPC, errno.EDQUOT, errno.EIO)
"""With these a server starts all the same: they may pass. What else fails is a mistake in the flag
or in the permissions."""


class Opened(NamedTuple):
    """A journal, and what an earlier scheduler left in it."""

    journal: Journal | NoJournal
    found: list[RecoveredRequest]


def header_of(run_dir: Path, name: str, model: ModelFiles) -> JournalHeader:
    """Return the header of a run's journal. name: what the user calls the model."""
    return JournalHeader(
        run_dir.name, name, model.fingerprint, model.vocab_size, model.context_length
    )


def open_journal(
    args: SchedulerArgs, run_dir: Path, header: JournalHeader, again: bool = False
) -> Opened:
    """Open the journal of a run.

    Args:
        args: whether there is one, where, and whether an earlier run's requests are resumed.
        run_dir: where it is by default.
        header: of this run.
        again: another scheduler of this run was there before. The front door has what is open and
            sends it again, so that the server goes on even without what the journal has.

    Raises:
        ConfigError: the directory cannot be used, another server has it, or an earlier run has
            left requests there that this one was not started to go on with, or cannot.
    """
    if args.no_journal:
        return Opened(NoJournal(), [])
    directory = Path(args.journal) if args.journal else run_dir
    file = JournalFile(directory / FILE_NAME, header, durable=bool(args.journal))
    try:
        _hold_directory(file)
        found = _left_behind(file, args.resume)
    except ConfigError as error:
        if not again:
            file.release()
            raise
        logging.error("%s. The open requests begin anew.", error)
        found = []
    return Opened(Journal(file), found)


def _hold_directory(file: JournalFile) -> None:
    directory, deadline = file.path.parent, time.monotonic() + LOCK_TIMEOUT_S
    while True:
        try:
            file.hold_directory()
            break
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise ConfigError(
                    f"--journal {directory} is the journal of another server that runs: stop that"
                    " one, or choose another directory"
                ) from None
            time.sleep(LOCK_POLL_S)
        except OSError as error:
            if error.errno in TROUBLES_OF_DISKS:
                return  # the first attempt to write says so
            raise _unusable(directory, str(error.strerror)) from None
    if not os.access(directory, os.R_OK | os.W_OK | os.X_OK):
        raise _unusable(directory, "it cannot be read and written")


def _unusable(directory: Path, why: str) -> ConfigError:
    return ConfigError(
        f"--journal {directory} cannot be used ({why}): choose a directory that this user may make"
        " and write to"
    )


def _left_behind(file: JournalFile, resume: bool) -> list[RecoveredRequest]:
    """What this run takes up of the journal that is there. ConfigError where it must not take the
    place of that journal."""
    path, own = file.path, file.header
    try:
        contents = read_journal(path)
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read ({error.strerror}), and may have unfinished requests: make it"
            " readable, remove it, or choose another --journal"
        ) from None
    if contents.header is None and contents.num_unread_bytes:
        raise ConfigError(
            f"{path} is no journal that this version can read, or its beginning is damaged: remove"
            " it, finish its requests with the version that wrote it, or choose another --journal"
        )
    if contents.header is None or contents.given_up_by == tag(own.run):
        return []
    if contents.header.run == own.run:
        return contents.found
    _check_earlier_run(path, contents, contents.header, own, resume)
    if not resume or _difference(contents.header, own):
        return []
    renumber(contents.found)
    return contents.found


def _check_earlier_run(
    path: Path, contents: Contents, theirs: JournalHeader, own: JournalHeader, resume: bool
) -> None:
    unfinished = contents.num_unfinished
    difference = _difference(theirs, own)
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


def _difference(theirs: JournalHeader, own: JournalHeader) -> str:
    """Why requests of the one cannot go on with the other, "" where they can."""
    if theirs.vocab_size != own.vocab_size:
        return (
            f"{theirs.model} with a vocabulary of {theirs.vocab_size}, and this server's"
            f" {own.model} has {own.vocab_size}"
        )
    if theirs.fingerprint != own.fingerprint:
        return (
            f"{theirs.model} (fingerprint {theirs.fingerprint}), and this server's is {own.model}"
            f" ({own.fingerprint})"
        )
    if theirs.context_length > own.context_length:
        return (
            f"{theirs.model} with a context of {theirs.context_length} tokens, and this server's"
            f" is {own.context_length}"
        )
    return ""
