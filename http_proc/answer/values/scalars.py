"""Convert numbers and literals to JSON."""

import json
import math
import re

_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_LEADING_ZERO = re.compile(r"[+-]?0[0-9]")
_LITERALS = {"true": "true", "false": "false", "null": "null",
             "True": "true", "False": "false", "None": "null"}  # fmt: skip


def scalar_to_json(token: str) -> str | None:
    """Return a number or a literal as JSON, or None if the token is neither."""
    if token in _LITERALS:
        return _LITERALS[token]
    if _NUMBER.fullmatch(token):
        return token
    if token[:1].isalpha() or _LEADING_ZERO.match(token):
        return None
    try:
        return str(int(token, 0))
    except ValueError:
        pass
    try:
        number = float(token)
    except ValueError:
        return None
    return json.dumps(number) if math.isfinite(number) else None
