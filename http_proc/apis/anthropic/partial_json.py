"""Read a JSON object that was cut off."""

import json
import re
from typing import Any

# A string, also one that is cut off, or a character of the structure.
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*(?:"|\\?\Z)|[{}\[\],]', re.S)
_CLOSING = {"{": "}", "[": "]"}


def complete_object(text: str) -> dict[str, Any]:
    """Return the members of a JSON object that are complete; {} if there are none.

    The text is cut after its last complete value, and the open brackets are closed.
    """
    closings: list[str] = []
    end = 0
    for token in _TOKEN.finditer(text):
        mark = token.group()
        if mark in _CLOSING:
            closings.append(_CLOSING[mark])
            end = token.end()
        elif mark in ("}", "]"):
            if not closings:
                break
            closings.pop()
            end = token.end()
        elif mark == ",":
            end = token.start()
    try:
        value = json.loads(text[:end] + "".join(reversed(closings)))
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
