"""The request log of the gateway: one line for each POST at its end."""

import logging
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from http_proc.protocol.timings import stages
from quadriga.client.types import Completion
from quadriga.runtime.logs import log_fields
from quadriga.runtime.request_line import (
    MAX_LOGGED_CHARS,
    MAX_REASON_CHARS,
    RequestLogLevel,
    first_token_times,
    in_a_line,
    seconds_of,
    stages_text,
    token_counts,
)


@dataclass(slots=True)
class RequestLogRecord:
    """What is logged of a web request.

    Attributes:
        id: of the answer; empty if the request has none.
        request_id: the X-Request-Id.
        status: of the answer; None if the client left before it was known.
        code: of the error that the client got; empty without one.
        error: its message; empty without one.
        began_at: time.monotonic() of its first byte.
    """

    id: str = ""
    request_id: str = ""
    status: int | None = None
    code: str = ""
    error: str = ""
    began_at: float = field(default_factory=time.monotonic)
    completions: list[Completion] = field(default_factory=list)


RECORD = web.RequestKey("record", RequestLogRecord)


def log_request(request: web.Request, outcome: str, level: RequestLogLevel) -> None:
    """Log one line, if the request is to be logged.

    Args:
        request: a web request at its end.
        outcome: status and error code, or that the client left.
        level: which requests are logged.
    """
    if level.is_off or request.method != "POST":
        return
    record = request[RECORD]
    seconds = time.monotonic() - record.began_at
    if level.is_slow(seconds):
        texts = [stages_text(stages(completion.timings)) for completion in record.completions[:1]]
        text = f"slow: {' · '.join([_line(request, outcome, seconds), *texts])}"
        log_fields(logging.WARNING, text, **_fields(request, seconds))
    elif level.logs_all:
        log_fields(logging.INFO, _line(request, outcome, seconds), **_fields(request, seconds))


def _fields(request: web.Request, seconds: float) -> dict[str, Any]:
    """Return the fields of a line in JSON, as docs/logs.md lists them."""
    record = request[RECORD]
    fields: dict[str, Any] = {
        "event": "request",
        "id": record.id or None,
        "request_id": record.request_id,
        "method": request.method[:MAX_LOGGED_CHARS],
        "path": request.path[:MAX_LOGGED_CHARS],
        "status": record.status,
        "code": record.code or None,
        "error": record.error[:MAX_REASON_CHARS] or None,
        "seconds": round(seconds, 6),
    }
    if record.completions:
        completions = record.completions
        usage, times = completions[0].usage, completions[0].timings
        first_s = times.token_times[0] - times.submitted if times.token_times else None
        fields |= {
            "ring_ids": sorted({completion.request_id for completion in completions}),
            "finish_reasons": [completion.finish_reason for completion in completions],
            "prompt_tokens": usage.prompt_tokens,
            "cached_tokens": usage.cached_tokens,
            "generated_tokens": sum(c.usage.completion_tokens for c in completions),
            "first_token_s": None if first_s is None else round(first_s, 6),
            "stages_s": seconds_of(stages(times)),
        }
    return fields


def _line(request: web.Request, outcome: str, seconds: float) -> str:
    record = request[RECORD]
    parts = [f"{in_a_line(request.method)} {in_a_line(request.path)} {outcome}"]
    parts.append(f"{seconds:.3f} s")
    if record.id:
        parts.insert(0, in_a_line(record.id))
    if record.completions:
        parts += _describe(record.completions)
    if record.error:
        parts.append(in_a_line(record.error, MAX_REASON_CHARS))
    return " · ".join(parts)


def _describe(completions: list[Completion]) -> list[str]:
    """Return finish reasons and token counts of all choices, and the times of the first."""
    reasons = Counter(completion.finish_reason for completion in completions)
    usage, times = completions[0].usage, completions[0].timings
    num_generated = sum(completion.usage.completion_tokens for completion in completions)
    parts = [
        ", ".join(
            reason if count == 1 else f"{count} {reason}" for reason, count in reasons.items()
        ),
        *token_counts(usage.prompt_tokens, usage.cached_tokens, num_generated),
    ]
    if times.token_times:
        queued_s, first_s = times.admitted - times.tokenized, times.token_times[0] - times.submitted
        parts += first_token_times(queued_s, first_s)
    return parts
