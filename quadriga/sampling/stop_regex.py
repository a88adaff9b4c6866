"""stop_regex: which regular expressions are taken, alike at the front door and in detok_proc.

The `regex` package searches with a time limit, and can say where a match has begun that further
text may complete; no linear-time library that we know of does the latter, without which a stream
would have to be held back by the longest possible match.
"""

import math
import re
from typing import TYPE_CHECKING

from quadriga.errors import InvalidRequest

if TYPE_CHECKING:
    import regex

MAX_MATCH = 256
"""Characters that a match may have, at most."""
MAX_REPEATS = 1000
EMPTY_SEARCH_TIMEOUT_S = 0.02
"""A search of the empty text takes microseconds, unless the expression calls itself without end."""
_REPEAT = re.compile(r"\{(\d*),?(\d*)\}")


def compile_stop_regex(pattern: str) -> "regex.Pattern[str]":
    """Raises InvalidRequest for one that is malformed, matches the empty string, or repeats too
    often: compiling takes time and memory in proportion to nested repeats."""
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
