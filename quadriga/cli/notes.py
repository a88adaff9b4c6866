"""Lines on standard error that are not part of an answer: notes, and how long an answer took."""

import os
import sys

from quadriga.client.types import Completion

DIM, NORMAL = "\x1b[2m", "\x1b[0m"


def note(text: str) -> None:
    """Print a line that is not part of an answer, dim on a terminal unless NO_COLOR is set."""
    if sys.stderr.isatty() and not os.environ.get("NO_COLOR"):
        text = f"{DIM}{text}{NORMAL}"
    print(text, file=sys.stderr, flush=True)


def speed(completion: Completion) -> str:
    """Return number of tokens and tokens per second; "" for an answer of less than two tokens."""
    count, rate = completion.usage.completion_tokens, tokens_per_s(completion)
    return f"{count} tokens · {rate:.1f} tok/s" if rate is not None else ""


def timing_line(completion: Completion) -> str:
    """Return the time in the queue, to the first token and in total, and tokens per second."""
    times, usage = completion.timings, completion.usage
    parts = []
    if times.admitted:
        parts.append(f"queue {_ms(times.admitted - (times.tokenized or times.submitted))}")
    if times.first_token:
        parts.append(f"first token {_ms(times.first_token - times.submitted)}")
    if (rate := tokens_per_s(completion)) is not None:
        parts.append(f"{rate:.1f} tok/s")
    parts.append(f"total {times.delivered - times.submitted:.2f} s")
    parts.append(f"{usage.prompt_tokens} prompt tokens, {usage.cached_tokens} of them cached")
    parts.append(f"{usage.completion_tokens} tokens")
    return " · ".join(parts)


def tokens_per_s(completion: Completion) -> float | None:
    """Return the decode speed, from the first token to the last; None for less than two tokens."""
    times = completion.timings.token_times
    if len(times) < 2 or times[-1] <= times[0]:
        return None
    return (completion.usage.completion_tokens - 1) / (times[-1] - times[0])


def _ms(seconds: float) -> str:
    return f"{1000 * max(0.0, seconds):.0f} ms"
