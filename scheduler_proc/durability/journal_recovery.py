"""The requests that the records of a journal describe; a record counts whole, or not at all."""

import itertools
from array import array
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from quadriga.wire.messages.arrays import unpack_ids
from quadriga.wire.messages.logprobs import LogprobBlock
from quadriga.wire.messages.to_scheduler import Submit
from scheduler_proc.durability.journal_records import Accepted, Ended, JournalRecord, LogprobRecord
from scheduler_proc.state.request import FinishReason, Request

BYTES_OF_NUMBER = 4
"""Of a token id or a log-probability."""


@dataclass(slots=True)
class RecoveredRequest:
    """A choice of a request, as far as the journal has it. first_token_at: Unix seconds."""

    seq: int
    index: int
    message: Submit
    max_new_tokens: int
    tokens: "array[int]" = field(default_factory=lambda: array("i"))
    logprobs: LogprobRecord = field(default_factory=lambda: LogprobRecord(-1, [], []))
    first_token_at: float = 0.0
    ended: Ended | None = None
    acknowledged: bool = False


class Nonsense(ValueError):
    """A frame is whole, but its content cannot be true."""


class JournalState:
    """The requests of the records taken in so far.

    Attributes:
        found: choices of requests, by number.
    """

    def __init__(self, vocab_size: int) -> None:
        self.found: dict[int, RecoveredRequest] = {}
        self._vocab_size = vocab_size
        self._open: set[int] = set()
        self._growing: set[int] = set()

    def take(self, record: JournalRecord) -> None:
        """Take in a whole record.

        Raises:
            ValueError, OverflowError: the record makes no sense; nothing of it was taken in.
        """
        new = self._new_requests(record.accepted)
        self._check(record, new)
        found = self.found
        found.update(new)
        self._open.update(new)
        self._growing.update(new)
        for step in record.tokens:
            for seq, token in zip(step.seqs, unpack_ids(step.token_ids), strict=True):
                request = found[seq]
                request.tokens.append(token)
                request.first_token_at = request.first_token_at or step.time
                if len(request.tokens) == request.max_new_tokens:
                    self._growing.discard(seq)
        for logprobs in record.logprobs:
            found[logprobs.seq].logprobs.tokens += logprobs.tokens
            found[logprobs.seq].logprobs.prompt += logprobs.prompt
        for ended in record.ended:
            found[ended.seq].ended = ended
            self._open.discard(ended.seq)
            self._growing.discard(ended.seq)
        for seq in record.acknowledged:
            if seq in found:
                found[seq].acknowledged = True

    def _new_requests(self, all_accepted: list[Accepted]) -> dict[int, RecoveredRequest]:
        new: dict[int, RecoveredRequest] = {}
        for accepted in all_accepted:
            max_new_tokens = _check_message(accepted, self._vocab_size)
            for index in accepted.indexes:
                seq = accepted.seq + index
                if seq in self.found or seq in new:
                    raise Nonsense(f"request {seq} is accepted twice")
                new[seq] = RecoveredRequest(seq, index, accepted.message, max_new_tokens)
        return new

    def _check(self, record: JournalRecord, new: dict[int, RecoveredRequest]) -> None:
        """Raise ValueError for a record that cannot follow those before it."""
        for step in record.tokens:
            ids = unpack_ids(step.token_ids)
            if len(ids) != len(step.seqs):
                raise Nonsense(f"{len(ids)} tokens are of {len(step.seqs)} requests")
            _check_ids(ids, self._vocab_size)
            if not self._growing.issuperset(step.seqs):
                _expect(step.seqs, self._growing, new)
        seqs = list(itertools.chain.from_iterable(step.seqs for step in record.tokens))
        if len(set(seqs)) < len(seqs):  # seldom: a token each cannot be too many
            self._check_room(Counter(seqs), new)
        _expect((logprobs.seq for logprobs in record.logprobs), self._open, new)
        _expect((ended.seq for ended in record.ended), self._open, new)
        for ended in record.ended:
            FinishReason(ended.finish_reason)
        for logprobs in record.logprobs:
            for block in (*logprobs.tokens, *logprobs.prompt):
                _check_block(block)

    def _check_room(self, num_tokens: dict[int, int], new: dict[int, RecoveredRequest]) -> None:
        for seq, count in num_tokens.items():
            request = new.get(seq) or self.found[seq]
            if len(request.tokens) + count > request.max_new_tokens:
                raise Nonsense(f"request {seq} has more than {request.max_new_tokens} tokens")


def _expect(seqs: Iterable[int], known: set[int], new: dict[int, RecoveredRequest]) -> None:
    for seq in seqs:
        if seq not in known and seq not in new:
            raise Nonsense(f"request {seq} is not there, or has ended")


def _check_message(accepted: Accepted, vocab_size: int) -> int:
    """Check that `restored` can make requests of this. Return its max_new_tokens."""
    message, params = accepted.message, accepted.message.params
    if accepted.seq < 0 or not all(0 <= index < params.n for index in accepted.indexes):
        raise Nonsense(f"request {accepted.seq} has choices {accepted.indexes} of {params.n}")
    max_new_tokens = params.max_new_tokens
    if max_new_tokens is None or max_new_tokens < 1 or (params.seed is None and params.n > 1):
        raise Nonsense(f"request {accepted.seq} has no max_new_tokens or no seed")
    _check_ids(unpack_ids(message.prompt_ids), vocab_size)
    for word in message.bad_words:
        unpack_ids(word)
    Request.from_submit(accepted.seq, message, frozenset(), params.n - 1)
    return max_new_tokens


def _check_ids(ids: "array[int]", vocab_size: int) -> None:
    if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
        raise Nonsense(f"a token id is not in the vocabulary of {vocab_size}")


def _check_block(block: LogprobBlock) -> None:
    num_top = len(block.values) * block.width
    if len(block.values) % BYTES_OF_NUMBER or not (
        num_top == len(block.top_ids) == len(block.top_values)
    ):
        raise Nonsense("log-probabilities are cut off")


# --- what becomes of it -----------------------------------------------------------------------


def renumber(requests: Iterable[RecoveredRequest]) -> None:
    """Number the requests of another run from 0 on, choices of one message in a row."""
    next_seq = 0
    for _, choices in itertools.groupby(requests, lambda request: request.seq - request.index):
        for choice in choices:
            choice.seq = next_seq + choice.index
            num_choices = choice.message.params.n
        next_seq += num_choices


def restored(recovered: RecoveredRequest, eos_ids: frozenset[int]) -> Request:
    """Return the request as the earlier scheduler had it, waiting or ended."""
    request = Request.from_submit(recovered.seq, recovered.message, eos_ids, recovered.index)
    request.tokens += recovered.tokens
    request.num_known_tokens = len(request.tokens)
    request.first_token_at = recovered.first_token_at
    request.logprobs = recovered.logprobs.tokens
    request.prompt_logprobs = recovered.logprobs.prompt
    ended = recovered.ended
    if ended is not None:
        request.finish(FinishReason(ended.finish_reason), ended.matched_stop, ended.error)
        request.cached_tokens, request.admitted_at = ended.cached_tokens, ended.admitted_at
    return request
