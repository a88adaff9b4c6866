"""The journal: accepted requests and their tokens on disk, for a scheduler that takes over.

It is one file of frames (journal_records.py), appended to after each step of the scheduler, when
the worker has its plan. A frame holds everything of its step, so that a crash loses whole steps:
their tokens are computed again, and are the same. The system's page cache keeps what was written
however the process ends. A file that outlives its run (--journal) is also synced, once a second.

A file that has grown is compacted: rewritten with the open requests, and the last ones that ended,
for clients that reconnect. A file that could not be written is rewritten as soon as it can be;
until then the server goes on without it.
"""

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from typing import NamedTuple

from quadriga.wire.messages.arrays import pack_ids
from quadriga.wire.messages.to_scheduler import Submit
from quadriga.wire.sockets import encode
from scheduler_proc.durability.journal_file import JournalFile
from scheduler_proc.durability.journal_records import (
    AcceptedRecord,
    JournalRecord,
    LogprobRecord,
    TokenRecord,
    ended_record,
)
from scheduler_proc.events import StepEvents
from scheduler_proc.state.request import Request

COMPACT_BYTES = 16 * 1024 * 1024  # a larger file is compacted once it has grown fourfold
MAX_ENDED = 1024  # ended requests that stay
MAX_ENDED_TOKENS = 1 << 20
RETRY_INTERVAL_S = 10.0
ON, OFF, FAILED = "on", "off", "failed"  # states of a journal, as the server's info has them


class JournaledRequest(NamedTuple):
    """A request that stays in the journal: as it was submitted, as it is, and what computes it."""

    message: Submit
    request: Request
    kernels: str


class NoJournal:
    """A journal that keeps nothing: for tests, the simulator, and --no-journal."""

    state = OFF

    def append(self, events: StepEvents) -> None:
        """Do nothing."""

    def keep(
        self, message: Submit, requests: Iterable[Request], acknowledged: bool, kernels: str
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


class Journal(NoJournal):
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
            token_ids = pack_ids(events.token_ids)
            record.tokens.append(TokenRecord(events.seqs, token_ids, events.time))
        for request in events.started:
            if request.prompt_logprobs:
                record.logprobs.append(
                    LogprobRecord(request.seq, [], list(request.prompt_logprobs))
                )
        for request in events.logprob_requests:
            record.logprobs.append(LogprobRecord(request.seq, [request.logprobs[-1]]))
        record.ended += map(ended_record, events.finished)
        record.acknowledged += events.acknowledged
        self._acknowledge(events.acknowledged)

    def keep(
        self,
        message: Submit,
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
            self._file.append(encode(record))
        except OSError as error:
            self._give_up(error)
        else:
            if self._file.size > self._compact_at:
                self.compact()

    def compact(self) -> None:
        """Rewrite the file with the requests that are kept."""
        try:
            self._file.rewrite(map(encode, self._snapshot()))
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
                if generated := request.generated:
                    seqs, token_ids = [seq] * len(generated), pack_ids(generated)
                    record.tokens.append(TokenRecord(seqs, token_ids, request.first_token_at))
                if request.logprobs or (request.first_token_at and request.prompt_logprobs):
                    record.logprobs.append(
                        LogprobRecord(seq, request.logprobs, request.prompt_logprobs)
                    )
                if request.finished:
                    record.ended.append(ended_record(request))
                if seq in self._ended:
                    record.acknowledged.append(seq)
            yield record
        if self._kernels and kernels != self._kernels:
            yield JournalRecord(kernels=self._kernels)
