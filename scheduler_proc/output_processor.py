"""Takes in what a step gave: tokens, what was told of them, and whose last step it was."""

from collections.abc import Iterable
from itertools import repeat
from typing import Protocol

from quadriga.errors import InvalidRequest, QuadrigaError
from quadriga.wire.messages.arrays import unpack_ids
from quadriga.wire.messages.worker import StepResult
from scheduler_proc.durability.detok_outbox import DetokOutbox
from scheduler_proc.durability.journal import Journal, NoJournal
from scheduler_proc.durability.step_output import open_text
from scheduler_proc.observe.stats import SchedulerStats
from scheduler_proc.planning.planner import Planner
from scheduler_proc.state.batch import ScheduleBatch
from scheduler_proc.state.request import Request, RequestStatus


class Ends(Protocol):
    """Ends requests; the scheduler itself."""

    def finish(self, request: Request, reason: str, matched_stop: int | None = None) -> None: ...

    def fail(self, request: Request, error: QuadrigaError) -> None: ...


class OutputProcessor:
    """Hands each token to its request, the journal and the detokenizer."""

    def __init__(
        self,
        texts: DetokOutbox,
        journal: Journal | NoJournal,
        statistics: SchedulerStats,
        ends: Ends,
    ) -> None:
        self._texts = texts
        self._journal = journal
        self._statistics = statistics
        self._ends = ends

    def take(self, batch: ScheduleBatch, result: StepResult, planner: Planner) -> None:
        """All of the step's output is in `texts.output` afterwards: its tokens carry its time."""
        requests, output, ended = batch.requests, self._texts.output, result.ended
        self._statistics.count_step(batch, result)
        output.time = ended
        for piece in result.prompt_logprobs:
            requests[piece.row].prompt_logprobs.append(piece.block)
        for failed in result.failed:
            self._ends.fail(requests[failed.row], InvalidRequest(failed.error))
        for request in requests:
            request.in_flight -= 1
        self._take_tokens(zip(requests, unpack_ids(result.token_ids), strict=True), ended)
        for one in result.forced:
            request, forced = requests[one.row], unpack_ids(one.token_ids)
            planner.jump(request, len(forced))
            self._take_tokens(zip(repeat(request), forced), ended)
        for request in [one for one in requests if one.in_flight == 0]:
            if request.status >= RequestStatus.RETRACTED:
                _steps_are_over(request, planner)
        self._statistics.generation_tokens += len(output.tokens)
        if result.logprobs is not None:
            for told in output.take_logprobs(result.logprobs, requests):
                self._journal.told(told.seq, told.told[-1])
        self._journal.produced(output.seqs, output.tokens, ended)

    def _take_tokens(self, told: Iterable[tuple[Request, int]], time: float) -> None:
        """Each request's next token; -1 where it has none yet."""
        output = self._texts.output
        all_seqs, all_tokens = output.seqs, output.tokens
        for request, token in told:
            if token < 0 or request.finish_reason:
                continue
            if not request.first_token:
                self._take_first_token(request, time)
            tokens = request.tokens
            tokens.append(token)
            all_seqs.append(request.seq)
            all_tokens.append(token)
            if token in request.stop_ids:
                self._ends.finish(request, "stop", matched_stop=token)
            elif len(tokens) == request.most_known:
                self._ends.finish(request, "length")

    def _take_first_token(self, request: Request, time: float) -> None:
        request.first_token = time
        if request.status is RequestStatus.PREFILLING:
            request.status = RequestStatus.DECODING
        self._statistics.prompt_tokens += request.num_prompt
        self._statistics.cached_tokens += request.cached_tokens
        self._texts.output.opened.append(open_text(request))
        if request.prompt_logprobs:
            self._journal.told_prompt(request.seq, request.prompt_logprobs)


def _steps_are_over(request: Request, planner: Planner) -> None:
    """A request that ended or was retracted has no step in flight any more."""
    if request.status is RequestStatus.RETRACTED:
        planner.giving_way.requeue(request)
    else:
        planner.release(request)
