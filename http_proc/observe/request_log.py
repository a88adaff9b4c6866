"""--log-requests: a line for each request at its end, with its id, lengths, times and reason.

No line has anything of what was asked or answered, nor a key.
"""

import logging
import time
from collections import Counter
from dataclasses import dataclass, field

from aiohttp import web

from quadriga.client.types import Completion

MAX_LOGGED_CHARS = 120
"""Characters of what a client has chosen."""


@dataclass(slots=True)
class RequestLogRecord:
    """What is known of a web request. id: of its answer; began: by time.monotonic()."""

    id: str = ""
    began: float = field(default_factory=time.monotonic)
    completions: list[Completion] = field(default_factory=list)


RECORD = web.RequestKey("record", RequestLogRecord)


def log_request(request: web.Request, outcome: str) -> None:
    """outcome: the status, the error's code, or that the client left."""
    record = request[RECORD]
    parts = [f"{in_a_line(request.method)} {in_a_line(request.path)} {outcome}"]
    parts.append(f"{time.monotonic() - record.began:.3f} s")
    if record.id:
        parts.insert(0, in_a_line(record.id))
    if record.completions:
        parts += _of(record.completions)
    logging.info("%s", " · ".join(parts))


def in_a_line(text: str) -> str:
    """Return what a client has chosen as it may stand in a log: one line, no control characters."""
    return repr(text[:MAX_LOGGED_CHARS])[1:-1]


def _of(completions: list[Completion]) -> list[str]:
    """Their ends, tokens, and the times of the first of them."""
    reasons = Counter(completion.finish_reason for completion in completions)
    first = completions[0]
    generated = sum(completion.usage.completion_tokens for completion in completions)
    parts = [
        ", ".join(
            reason if count == 1 else f"{count} {reason}" for reason, count in reasons.items()
        ),
        f"prompt {first.usage.prompt_tokens} tokens, {first.usage.cached_tokens} cached",
        f"generated {generated}",
    ]
    times = first.timings
    if times.token_times:
        parts.append(f"queued {max(0.0, times.admitted - times.tokenized):.3f} s")
        parts.append(f"first token {times.token_times[0] - times.submitted:.3f} s")
    return parts
