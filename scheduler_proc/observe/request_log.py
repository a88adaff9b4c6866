"""The request log of the ring: one line for each choice at its end. The gateway logs its own."""

import logging

from quadriga.runtime.request_line import (
    MAX_REASON_CHARS,
    RequestLogLevel,
    first_token_times,
    in_a_line,
    stages_text,
    token_counts,
)
from quadriga.wire.client_address import is_gateway, short_address
from scheduler_proc.observe.stats import stage_seconds
from scheduler_proc.state.request import Request


class RequestLog:
    """Log requests at their end, all of them or the slow ones."""

    def __init__(self, level: RequestLogLevel) -> None:
        self._level = level

    def on_finish(self, request: Request, now: float) -> None:
        """Log a request that has ended, if it is to be logged. `now`: Unix time in seconds."""
        if is_gateway(request.client):
            return
        seconds = now - request.received_at
        if self._level.is_slow(seconds):
            stages = stages_text(stage_seconds(request, now))
            logging.warning("slow: %s · %s", _line(request, seconds), stages)
        elif self._level.logs_all:
            logging.info("%s", _line(request, seconds))


def _line(request: Request, seconds: float) -> str:
    assert request.finish_reason is not None
    parts = [in_a_line(request.request_id), f"client {short_address(request.client)}"]
    if request.sampling.params.n > 1:
        parts.append(f"choice {request.index}")
    parts += [request.finish_reason.value, f"{seconds:.3f} s"]
    parts += token_counts(request.num_prompt, request.cached_tokens, request.num_generated)
    if request.first_token_at:
        parts += first_token_times(
            request.admitted_at - request.tokenized_at,
            request.first_token_at - request.received_at,
        )
    if request.error is not None:
        reason = in_a_line(request.error.message, MAX_REASON_CHARS)
        parts.append(f"{request.error.code}: {reason}")
    return " · ".join(parts)
