"""Names that resemble a misspelt one, and errors for keywords that a call does not have."""

import difflib
from collections.abc import Iterable

MAX_SUGGESTIONS = 3
# Similarity from which a name is taken for the one that was meant; 1.0: equal.
MIN_SIMILARITY = 0.7


def similar(name: str, known: Iterable[str]) -> list[str]:
    """Return the known names that may be meant by a misspelt one, the likeliest first."""
    return difflib.get_close_matches(name, list(known), MAX_SUGGESTIONS, MIN_SIMILARITY)


def nearest(name: str, known: Iterable[str]) -> str:
    """Return "; near it: …" with the known names that resemble a name, or ""."""
    near = similar(name, known)
    return f"; near it: {', '.join(near)}" if near else ""


def check_keywords(call: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Raise TypeError for the first keyword that a call does not have."""
    names = list(known)
    for name in given:
        if name not in names:
            raise TypeError(f"{call}() has no keyword {name!r}{nearest(name, names)}")
