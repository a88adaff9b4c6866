"""Where the time of an answer went: `timings` of its body, and the header Server-Timing."""

from collections.abc import Iterable, Sequence

import msgspec

from quadriga.client.types import Completion, Timings

SERVER_TIMING = "Server-Timing"

Stage = tuple[str, float]


class TimingsBody(msgspec.Struct):
    """Milliseconds and speed of an answer. Times that it did not come to are null.

    queue_ms, prefill_ms and ttft_ms are those of the choice whose first token came first: from the
    end of tokenization to admission, from admission to the first token, and from the arrival at the
    gateway to the first token. decode_ms: from the first token of any choice to the last of any.
    tokens_per_second: tokens of all choices after the first of each, per second of decode_ms.
    cached_tokens: tokens of that choice's prompt that came from the prefix cache.
    """

    queue_ms: float | None
    prefill_ms: float | None
    ttft_ms: float | None
    decode_ms: float | None
    tokens_per_second: float | None
    cached_tokens: int


def timings_body(completions: Sequence[Completion]) -> TimingsBody:
    """Return the timings of an answer, which has at least one choice."""
    with_tokens = [completion for completion in completions if completion.timings.token_times]
    if not with_tokens:
        queue_s = completions[0].timings.queue
        cached = completions[0].usage.cached_tokens
        return TimingsBody(_ms(queue_s), None, None, None, None, cached)
    first = min(with_tokens, key=lambda completion: completion.timings.token_times[0])
    times = first.timings
    first_at = times.token_times[0]
    decode_s = max(completion.timings.token_times[-1] for completion in with_tokens) - first_at
    num_later = sum(len(completion.timings.token_times) - 1 for completion in with_tokens)
    return TimingsBody(
        queue_ms=_ms(times.queue),
        prefill_ms=_ms(max(0.0, first_at - times.admitted) if times.admitted else None),
        ttft_ms=_ms(first_at - times.submitted),
        decode_ms=_ms(decode_s),
        tokens_per_second=round(num_later / decode_s, 3) if num_later and decode_s > 0 else None,
        cached_tokens=first.usage.cached_tokens,
    )


def stages(times: Timings) -> list[Stage]:
    """Return the stages of a choice from the frontend to the gateway, and their seconds."""
    passed = [("tokenize", times.tokenized - times.received)]
    if times.token_times:
        first, last = times.token_times[0], times.token_times[-1]
        passed += [
            ("queue", times.admitted - times.tokenized),
            ("prefill", first - times.admitted),
            ("decode", last - first),
            ("detokenize", times.detokenized - last),
            ("delivery", times.delivered - times.detokenized),
        ]
    return passed


def server_timing(passed: Iterable[Stage]) -> str:
    """Return the value of the header for stages and their seconds."""
    return ", ".join(f"{name};dur={1000 * max(0.0, seconds):.1f}" for name, seconds in passed)


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(1000 * seconds, 3)
