"""What requests ask of the prefix cache, in the fields of Anthropic's and OpenAI's APIs."""

import re
from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

import msgspec

from http_proc.core.errors import invalid
from quadriga.wire.cache import MAX_CACHE_KEY_CHARS, MAX_CACHE_TTL_S, CacheHint

MINUTES_5, MINUTES_30, HOUR = 300.0, 1800.0, 3600.0
EXPLICIT = "explicit"
_TTLS = {"5m": MINUTES_5, "1h": HOUR}
_DURATION = re.compile(r"(\d{1,6})([smh])")
_SECONDS = {"s": 1, "m": 60, "h": 3600}


class CacheControl(msgspec.Struct, kw_only=True):
    """Keep what is before the end of this block in the prefix cache. ttl: from its last use."""

    type: str = "ephemeral"
    ttl: Literal["5m", "1h"] | None = None


class PromptMark(NamedTuple):
    """A place in a chat up to which its prompt is kept.

    Attributes:
        num_messages: of the chat in the server's form, from its first one.
        num_chars: characters of the last one's content; None: all of it.
    """

    num_messages: int
    num_chars: int | None = None


def marked_hint(marks: Iterable[CacheControl | None], last: PromptMark | None) -> CacheHint | None:
    """Return what Anthropic's marks ask for: the longest time of them; None without a mark.

    last: the place of the last one; None: the end of the prompt.
    """
    times = [_TTLS[mark.ttl or "5m"] for mark in marks if mark is not None]
    return _up_to(CacheHint("", max(times)), last) if times else None


def _up_to(hint: CacheHint, mark: PromptMark | None) -> CacheHint:
    if mark is None:
        return hint
    return msgspec.structs.replace(hint, num_messages=mark.num_messages, num_chars=mark.num_chars)


def last_breakpoint(contents: Iterable[object]) -> PromptMark | None:
    """Return the place of the last part of messages that has a prompt_cache_breakpoint.

    contents: of each message: a list of parts, or something else.
    """
    found = None
    for place, content in enumerate(contents, start=1):
        num_chars = 0
        for part in content if isinstance(content, list) else ():
            num_chars += len(part.text or part.refusal or "")
            if part.prompt_cache_breakpoint is not None:
                found = PromptMark(place, num_chars)
    return found


def openai_hint(
    key: str | None,
    retention: str | None,
    options: dict[str, Any] | None,
    mark: PromptMark | None = None,
) -> CacheHint | None:
    """Return what OpenAI's fields ask for; None without one.

    The time is that of the options, else that of the retention. A word that is not a duration
    stands for the default. With the mode "explicit" of the options the prompt is kept up to its
    last breakpoint, else the whole prompt is.

    Args:
        key: prompt_cache_key.
        retention: prompt_cache_retention.
        options: prompt_cache_options.
        mark: the last prompt_cache_breakpoint.

    Raises:
        ApiError: the key is too long.
    """
    is_explicit = options is not None and options.get("mode") == EXPLICIT
    if is_explicit and mark is None:
        return None
    if key is None and retention is None and options is None and mark is None:
        return None
    key = key or ""
    if len(key) > MAX_CACHE_KEY_CHARS:
        raise invalid(
            f"prompt_cache_key has {len(key)} characters: at most {MAX_CACHE_KEY_CHARS} are taken;"
            " send a hash of it",
            "prompt_cache_key",
        )
    if options is not None:
        hint = CacheHint(key, _seconds(options.get("ttl"), MINUTES_30))
        return _up_to(hint, mark if is_explicit else None)
    default_s = MINUTES_5 if mark is None else MINUTES_30
    return CacheHint(key, _seconds(retention, default_s))


def _seconds(duration: object, default_s: float) -> float:
    """Return the seconds of a duration such as "30m", within the limits of the server."""
    match = _DURATION.fullmatch(duration) if isinstance(duration, str) else None
    if match is None:
        return default_s
    return min(max(int(match[1]) * _SECONDS[match[2]], 1.0), MAX_CACHE_TTL_S)
