"""Compilation of stop_regex, the same in the frontend and in detok_proc.

The `regex` package searches with a time limit and reports partial matches. No known linear-time
library does the latter; without it, a stream would be held back by the longest possible match.
"""

import math
import re
from typing import TYPE_CHECKING

from quadriga.errors import InvalidRequest

if TYPE_CHECKING:
    import regex

MAX_MATCH_CHARS = 256
MAX_REPEATS = 1000
# Searching the empty text takes microseconds, unless the expression recurses without end.
EMPTY_SEARCH_TIMEOUT_S = 0.02
_REPEAT = re.compile(r"\{(\d*),?(\d*)\}")


def compile_stop_regex(pattern: str) -> "regex.Pattern[str]":
    """Compile a stop expression.

    Raises:
        InvalidRequest: the expression is malformed, matches the empty string, or repeats too
            often; compiling takes time and memory in proportion to nested repeats.
    """
    import regex

    repeats = math.prod(
        max(1, *(int(number or 0) for number in counts)) for counts in _REPEAT.findall(pattern)
    )
    if repeats > MAX_REPEATS:
        raise _refused(
            pattern, f"its repeats multiply to {repeats}: at most {MAX_REPEATS} are allowed"
        )
    try:
        compiled = regex.compile(pattern)
    except (regex.error, RecursionError, OverflowError) as error:
        raise _refused(pattern, f"it is no regular expression: {error}") from None
    try:
        matches_nothing = compiled.search("", timeout=EMPTY_SEARCH_TIMEOUT_S) is not None
    except (TimeoutError, MemoryError, RecursionError):
        raise _refused(pattern, "it calls itself without end; leave the recursion out") from None
    if matches_nothing:
        raise _refused(pattern, "it matches the empty string, so that it would stop every text")
    return compiled


def _refused(pattern: str, why: str) -> InvalidRequest:
    return InvalidRequest(f"stop_regex is {pattern!r}: {why}", "stop_regex")
