"""Takes in what a step gave: tokens, what was told of them, and whose last step it was."""

from array import array
from typing import Protocol

from quadriga.errors import QuadrigaError, RequestFailed
from quadriga.messages.arrays import unpack_ids
from quadriga.messages.worker import StepResult
from scheduler_proc.batch import ScheduleBatch
from scheduler_proc.journal import Journal, NoJournal
from scheduler_proc.output import open_text
from scheduler_proc.planner import Planner
from scheduler_proc.request import Request, Status
from scheduler_proc.statistics import Statistics
from scheduler_proc.texts import Texts


class Ends(Protocol):
    """Ends requests; the scheduler itself."""

    def finish(self, request: Request, reason: str, matched_stop: int | None = None) -> None: ...

    def fail(self, request: Request, error: QuadrigaError) -> None: ...


class Results:
    """Hands each token to its request, the journal and the detokenizer."""

    def __init__(
        self, texts: Texts, journal: Journal | NoJournal, statistics: Statistics, ends: Ends
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
            self._ends.fail(requests[failed.row], RequestFailed(failed.error))
        forced = {requests[one.row].seq: unpack_ids(one.token_ids) for one in result.forced}
        for request, token in zip(requests, unpack_ids(result.token_ids), strict=True):
            request.in_flight -= 1
            if token >= 0:
                self._take_token(request, token, ended)
            if forced and request.seq in forced:
                self._take_forced(request, forced[request.seq], ended, planner)
            if request.in_flight == 0 and request.status >= Status.RETRACTED:
                _steps_are_over(request, planner)
        self._statistics.generation_tokens += len(output.tokens)
        if result.logprobs is not None:
            for told in output.take_logprobs(result.logprobs, requests):
                self._journal.told(told.seq, told.told[-1])
        self._journal.produced(output.seqs, output.tokens, ended)

    def _take_forced(
        self, request: Request, tokens: "array[int]", time: float, planner: Planner
    ) -> None:
        planner.jump(request, len(tokens))
        for token in tokens:
            self._take_token(request, token, time)

    def _take_token(self, request: Request, token: int, time: float) -> None:
        if request.finish_reason:
            return
        if not request.first_token:
            self._take_first_token(request, time)
        tokens, output = request.tokens, self._texts.output
        tokens.append(token)
        output.seqs.append(request.seq)
        output.tokens.append(token)
        if token in request.stop_ids:
            self._ends.finish(request, "stop", matched_stop=token)
        elif len(tokens) == request.most_known:
            self._ends.finish(request, "length")

    def _take_first_token(self, request: Request, time: float) -> None:
        request.first_token = time
        if request.status is Status.PREFILLING:
            request.status = Status.DECODING
        self._statistics.prompt_tokens += request.num_prompt
        self._statistics.cached_tokens += request.cached_tokens
        self._texts.output.opened.append(open_text(request))
        if request.prompt_logprobs:
            self._journal.told_prompt(request.seq, request.prompt_logprobs)


def _steps_are_over(request: Request, planner: Planner) -> None:
    """A request that ended or was retracted has no step in flight any more."""
    if request.status is Status.RETRACTED:
        planner.requeue(request)
    else:
        planner.release(request)
