"""What requests ask of the prefix cache, in the fields of Anthropic's and OpenAI's APIs."""

import re
from collections.abc import Iterable
from typing import Any, Literal

import msgspec

from http_proc.core.errors import invalid
from quadriga.wire.cache import MAX_CACHE_KEY_CHARS, MAX_CACHE_TTL_S, CacheHint

MINUTES_5, MINUTES_30, HOUR = 300.0, 1800.0, 3600.0
_TTLS = {"5m": MINUTES_5, "1h": HOUR}
_DURATION = re.compile(r"(\d{1,6})([smh])")
_SECONDS = {"s": 1, "m": 60, "h": 3600}


class CacheControl(msgspec.Struct, kw_only=True):
    """Keep what is before the end of this block in the prefix cache. ttl: from its last use."""

    type: str = "ephemeral"
    ttl: Literal["5m", "1h"] | None = None


def marked_hint(marks: Iterable[CacheControl | None]) -> CacheHint | None:
    """Return what Anthropic's marks ask for: the longest time of them; None without a mark."""
    times = [_TTLS[mark.ttl or "5m"] for mark in marks if mark is not None]
    return CacheHint("", max(times)) if times else None


def openai_hint(
    key: str | None, retention: str | None, options: dict[str, Any] | None
) -> CacheHint | None:
    """Return what OpenAI's fields ask for; None without one.

    The time is that of the options, else that of the retention. A word that is not a duration
    stands for the default.

    Args:
        key: prompt_cache_key.
        retention: prompt_cache_retention.
        options: prompt_cache_options.

    Raises:
        ApiError: the key is too long.
    """
    if key is None and retention is None and options is None:
        return None
    key = key or ""
    if len(key) > MAX_CACHE_KEY_CHARS:
        raise invalid(
            f"prompt_cache_key has {len(key)} characters: at most {MAX_CACHE_KEY_CHARS} are taken;"
            " send a hash of it",
            "prompt_cache_key",
        )
    if options is not None:
        return CacheHint(key, _seconds(options.get("ttl"), MINUTES_30))
    return CacheHint(key, _seconds(retention, MINUTES_5))


def _seconds(duration: object, default_s: float) -> float:
    """Return the seconds of a duration such as "30m", within the limits of the server."""
    match = _DURATION.fullmatch(duration) if isinstance(duration, str) else None
    if match is None:
        return default_s
    return min(max(int(match[1]) * _SECONDS[match[2]], 1.0), MAX_CACHE_TTL_S)
