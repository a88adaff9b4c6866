"""Names that resemble a misspelt one, and errors for keywords that a call does not have."""

import difflib
from collections.abc import Iterable

MAX_SUGGESTIONS = 3


def nearest(name: str, known: Iterable[str]) -> str:
    """Return "; near it: …" with the known names that resemble a name, or ""."""
    near = difflib.get_close_matches(name, list(known), MAX_SUGGESTIONS)
    return f"; near it: {', '.join(near)}" if near else ""


def check_keywords(call: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Raise TypeError for the first keyword that a call does not have."""
    names = list(known)
    for name in given:
        if name not in names:
            raise TypeError(f"{call}() has no keyword {name!r}{nearest(name, names)}")
