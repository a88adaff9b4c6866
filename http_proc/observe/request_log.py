"""The lines of --log-requests: one for each request at its end.

A line has id, outcome, token counts and times; never text, token ids or keys.
"""

import logging
import time
from collections import Counter
from dataclasses import dataclass, field

from aiohttp import web

from quadriga.client.types import Completion

# Longest part of a line that a client can choose, such as the path.
MAX_LOGGED_CHARS = 120


@dataclass(slots=True)
class RequestLogRecord:
    """What is logged of a web request.

    Attributes:
        id: of the answer; empty if the request has none.
        began_at: time.monotonic() of its first byte.
    """

    id: str = ""
    began_at: float = field(default_factory=time.monotonic)
    completions: list[Completion] = field(default_factory=list)


RECORD = web.RequestKey("record", RequestLogRecord)


def log_request(request: web.Request, outcome: str) -> None:
    """Log one line. `outcome`: status and error code, or that the client left."""
    record = request[RECORD]
    parts = [f"{in_a_line(request.method)} {in_a_line(request.path)} {outcome}"]
    parts.append(f"{time.monotonic() - record.began_at:.3f} s")
    if record.id:
        parts.insert(0, in_a_line(record.id))
    if record.completions:
        parts += _describe(record.completions)
    logging.info("%s", " · ".join(parts))


def in_a_line(text: str) -> str:
    """Return a client's text shortened and without line breaks and control characters."""
    return repr(text[:MAX_LOGGED_CHARS])[1:-1]


def _describe(completions: list[Completion]) -> list[str]:
    """Return finish reasons and token counts of all choices, and the times of the first."""
    reasons = Counter(completion.finish_reason for completion in completions)
    first = completions[0]
    num_generated = sum(completion.usage.completion_tokens for completion in completions)
    parts = [
        ", ".join(
            reason if count == 1 else f"{count} {reason}" for reason, count in reasons.items()
        ),
        f"prompt {first.usage.prompt_tokens} tokens, {first.usage.cached_tokens} cached",
        f"generated {num_generated}",
    ]
    times = first.timings
    if times.token_times:
        parts.append(f"queued {max(0.0, times.admitted - times.tokenized):.3f} s")
        parts.append(f"first token {times.token_times[0] - times.submitted:.3f} s")
    return parts
