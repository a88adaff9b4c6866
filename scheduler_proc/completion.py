"""What the result of a step means: tokens, ends, and requests that have no step in flight now."""

from collections.abc import Iterable
from itertools import repeat

from quadriga.wire.messages.arrays import unpack_ids
from quadriga.wire.messages.worker import StepResult
from scheduler_proc.planning.batching import ContinuousBatching
from scheduler_proc.planning.retraction import Retraction
from scheduler_proc.state.batch import RunningBatch, ScheduleBatch
from scheduler_proc.state.kv_cache import KVCache
from scheduler_proc.state.plan import StepUpdate
from scheduler_proc.state.request import FinishReason, Request, RequestStatus


class StepCompletion:
    """Append the tokens of steps to their requests, and end those that are complete.

    Args:
        running: the requests that decode.
        batching: how requests leave.
        retraction: queues retracted requests again.
        kv: the KV pages.
    """

    def __init__(
        self,
        running: RunningBatch,
        batching: ContinuousBatching,
        retraction: Retraction,
        kv: KVCache,
    ) -> None:
        self._running = running
        self._batching = batching
        self._retraction = retraction
        self._kv = kv

    def complete(self, batch: ScheduleBatch, result: StepResult) -> StepUpdate:
        """Take in the result of a step and return what it brought.

        A request whose last step in flight it was, and that has ended or was retracted, gives back
        slot and pages.
        """
        requests, update = batch.requests, StepUpdate()
        for piece in result.prompt_logprobs:
            requests[piece.row].prompt_logprobs.append(piece.block)
        for nonfinite in result.nonfinite:
            self._kv.withdraw(requests[nonfinite.row], nonfinite.position)
        for request in requests:
            request.in_flight -= 1
        token_ids = unpack_ids(result.token_ids)
        self._take_tokens(zip(requests, token_ids, strict=True), result.ended, update)
        for guessed in result.guessed:
            further = unpack_ids(guessed.token_ids)
            requests[guessed.row].extend_guessed(len(further))
            self._take_further(requests[guessed.row], further, result.ended, update)
        for row in result.forced:
            forced = unpack_ids(row.token_ids)
            requests[row.row].extend_forced(len(forced))
            self._take_further(requests[row.row], forced, result.ended, update)
        for request in requests:
            if request.in_flight == 0 and request.status >= RequestStatus.RETRACTED:
                if request.status is RequestStatus.RETRACTED:
                    self._retraction.requeue(request, update.failed)
                else:
                    self._batching.release(request)
        return update

    def _take_further(
        self, request: Request, token_ids: Iterable[int], time: float, update: StepUpdate
    ) -> None:
        """Append tokens that follow the one that a row sampled."""
        if request.num_remaining_tokens <= 0 and request in self._running:
            self._batching.stop(request)
        self._take_tokens(zip(repeat(request), token_ids), time, update)

    def _take_tokens(
        self, tokens: Iterable[tuple[Request, int]], time: float, update: StepUpdate
    ) -> None:
        """Append each request's next token; -1 where the step sampled none."""
        seqs, token_ids = update.seqs, update.token_ids
        for request, token in tokens:
            if token < 0 or request.finish_reason:
                continue
            if not request.first_token_at:
                request.first_token_at = time
                if request.status is RequestStatus.PREFILLING:
                    request.status = RequestStatus.DECODING
                update.started.append(request)
            known = request.tokens
            known.append(token)
            seqs.append(request.seq)
            token_ids.append(token)
            if token in request.stop_ids:
                self._finish(request, FinishReason.STOP, token, update)
            elif len(known) == request.max_total_tokens:
                self._finish(request, FinishReason.LENGTH, None, update)

    def _finish(
        self, request: Request, reason: FinishReason, matched_stop: int | None, update: StepUpdate
    ) -> None:
        self._batching.remove(request)
        request.finish(reason, matched_stop)
        update.finished.append(request)
