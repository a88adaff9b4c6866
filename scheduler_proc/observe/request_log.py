"""The request log of the ring: one line for each choice at its end.

The gateway logs its own requests. In JSON the scheduler's part of them is a line, too.
"""

import logging
from typing import Any

from quadriga.runtime.logs import log_fields
from quadriga.runtime.request_line import (
    MAX_REASON_CHARS,
    RequestLogLevel,
    first_token_times,
    in_a_line,
    seconds_of,
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
        if is_gateway(request.client) and not self._level.is_json:
            return
        seconds = now - request.received_at
        if self._level.is_slow(seconds):
            stages = stages_text(stage_seconds(request, now))
            text = f"slow: {_line(request, seconds)} · {stages}"
            log_fields(logging.WARNING, text, **_fields(request, now))
        elif self._level.logs_all:
            log_fields(logging.INFO, _line(request, seconds), **_fields(request, now))


def _fields(request: Request, now: float) -> dict[str, Any]:
    """Return the fields of a line in JSON, as docs/logs.md lists them."""
    assert request.finish_reason is not None
    error, first_at = request.error, request.first_token_at
    return {
        "event": "scheduled" if is_gateway(request.client) else "request",
        "request_id": request.request_id,
        "client": short_address(request.client),
        "choice": request.index,
        "finish_reason": request.finish_reason.value,
        "seconds": round(now - request.received_at, 6),
        "prompt_tokens": request.num_prompt,
        "cached_tokens": request.cached_tokens,
        "generated_tokens": request.num_generated,
        "first_token_s": round(first_at - request.received_at, 6) if first_at else None,
        "stages_s": seconds_of(stage_seconds(request, now)),
        "waited_for": list(request.waited_for),
        "retractions": request.num_retractions,
        "priority": request.priority,
        "code": None if error is None else error.code,
        "error": None if error is None else error.message[:MAX_REASON_CHARS],
    }


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
