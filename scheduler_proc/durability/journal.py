"""What was accepted, what came of it: on disk, so that another scheduler can go on with it.

One file of frames (journal_records.py), appended to after each round of the scheduler, when the
worker has its plan. A frame has all of its round, so that a tail torn off by a crash loses whole
rounds: what they gave is computed again, and is the same. The system's cache holds what was written
however the process ends; against a loss of power a file that is meant to outlive its run
(--journal) is also synced, once a second.

A file that has grown is written anew with what still matters: requests that go on, and the last
ones that ended, for clients whose connection was lost. So is one that could not be written, as soon
as it can be again: until then the server goes on without it.
"""

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from typing import NamedTuple

from quadriga.wire.messages.arrays import pack_ids
from quadriga.wire.messages.logprobs import LogprobBlock
from quadriga.wire.messages.to_scheduler import Submit
from quadriga.wire.sockets import encode
from scheduler_proc.durability.journal_file import JournalFile
from scheduler_proc.durability.journal_records import (
    Accepted,
    JournalRecord,
    LogprobRecord,
    TokenRecord,
    ended_of,
)
from scheduler_proc.state.request import Request

COMPACT_AT = 16 * 1024 * 1024
"""Bytes from which on a file is written anew, if that makes it a quarter."""
MAX_ENDED = 1024
MAX_ENDED_TOKENS = 1 << 20
"""Ended requests that stay, and their tokens."""
RETRY_INTERVAL_S = 10.0
"""Between two attempts to write a file anew that cannot be written."""
ON, OFF, FAILED = "on", "off", "failed"
"""States of a journal, as the server's info has them."""


class JournaledRequest(NamedTuple):
    """A request that stays in the journal: as it came, and as it is."""

    message: Submit
    request: Request


class Journal:
    """Writes. What is told between two commits becomes one frame. Nothing is written before the
    first `compact`, which takes the place of what was there. No failure of the disk reaches the
    caller.

    Attributes:
        state: ON, or FAILED while the file cannot be written.
    """

    def __init__(self, file: JournalFile, clock: Callable[[], float] = time.monotonic) -> None:
        """clock: seconds that never jump."""
        self.state = ON
        self._file = file
        self._clock = clock
        self._retry_at = 0.0
        self._kept: dict[int, JournaledRequest] = {}
        self._ended: OrderedDict[int, None] = OrderedDict()
        self._ended_tokens = 0
        self._round = JournalRecord()
        self._compact_at = COMPACT_AT

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
            self._kept[request.seq] = JournaledRequest(message, request)

    def produced(self, seqs: list[int], tokens: list[int], time: float) -> None:
        """The tokens of a step, which ended at `time` (Unix seconds)."""
        if seqs:
            self._round.tokens.append(TokenRecord(seqs, pack_ids(tokens), time))

    def told(self, seq: int, logprobs: LogprobBlock) -> None:
        """The log-probability of the last token of a request, once that is produced."""
        self._round.told.append(LogprobRecord(seq, [logprobs]))

    def told_prompt(self, seq: int, logprobs: list[LogprobBlock]) -> None:
        """Those of all of its prompt."""
        self._round.told.append(LogprobRecord(seq, [], list(logprobs)))

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
        while len(self._ended) > MAX_ENDED or self._ended_tokens > MAX_ENDED_TOKENS:
            seq, _ = self._ended.popitem(last=False)
            kept = self._kept.pop(seq)
            self._ended_tokens -= kept.request.size

    # --- the file ---------------------------------------------------------------------------------

    def commit(self) -> None:
        """Write what was told since the last time."""
        if self._round.is_empty:
            return
        told, self._round = self._round, JournalRecord()
        if self.state == FAILED:
            if self._clock() >= self._retry_at:
                self.compact()
            return
        try:
            self._file.append(encode(told))
        except OSError as error:
            self._give_up(error)
        else:
            if self._file.size > self._compact_at:
                self.compact()

    def compact(self) -> None:
        """Write the file anew, with what still matters."""
        try:
            self._file.rewrite(map(encode, self._snapshot()))
        except OSError as error:
            self._give_up(error)
            return
        self._compact_at = max(COMPACT_AT, 4 * self._file.size)
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
            "the journal %s cannot be written (%s): until it can, only the front door and the"
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
        """A round for each message: all in one would leave holes of its size in the heap."""
        by_number = sorted(self._kept.items())
        for first, kept in groupby(by_number, lambda one: one[0] - one[1].request.index):
            everything = JournalRecord()
            for seq, (message, request) in kept:
                if not everything.accepted:
                    everything.accepted.append(Accepted(first, message, []))
                everything.accepted[0].indexes.append(request.index)
                generated = request.tokens[request.num_prompt :]
                if generated:
                    seqs = [seq] * len(generated)
                    everything.tokens.append(
                        TokenRecord(seqs, pack_ids(generated), request.first_token)
                    )
                if request.told or (request.first_token and request.prompt_logprobs):
                    everything.told.append(
                        LogprobRecord(seq, request.told, request.prompt_logprobs)
                    )
                if request.finished:
                    everything.ended.append(ended_of(request))
                if seq in self._ended:
                    everything.settled.append(seq)
            yield everything


class NoJournal:
    """Remembers nothing: for tests, the simulator, and --no-journal."""

    state = OFF

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


NO_JOURNAL = NoJournal()
