"""The session of an agent that a web request belongs to, by its headers.

A session's prefix stays in the prefix cache for its next turn where a header says how long. The
fields of a body come first.
"""

import re
from collections.abc import Mapping
from contextvars import ContextVar
from typing import NamedTuple

from http_proc.core.errors import invalid
from quadriga.wire.cache import MAX_CACHE_KEY_CHARS, MAX_CACHE_TTL_S, CacheHint

# The second one is that of NVIDIA Dynamo.
NAME_HEADERS = ("X-Session-Id", "X-Dynamo-Session-Id")
KEEP_ALIVE_HEADER = "X-Session-Keep-Alive"
_DURATION = re.compile(r"(\d{1,6})([smh]?)", re.ASCII)
_SECONDS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}


class CallSession(NamedTuple):
    """What the headers of a request say.

    Attributes:
        name: of the session; "" for none.
        keep_s: seconds from its last use for which it stays cached; 0: as long as there is room.
    """

    name: str = ""
    keep_s: float = 0.0

    def hint(self, of_body: CacheHint | None) -> CacheHint | None:
        """Return what a request asks of the prefix cache.

        of_body: what its body asks; it gets the session's name as its key where it has none.
        """
        if of_body is not None:
            if of_body.key or not self.name:
                return of_body
            return CacheHint(self.name, of_body.ttl_s)
        return CacheHint(self.name, self.keep_s) if self.keep_s else None


NO_SESSION = CallSession()


def session_of(headers: Mapping[str, str]) -> CallSession:
    """Return the session of a request.

    Raises:
        ApiError: the name is too long, or the time is none.
    """
    found = next((name for name in NAME_HEADERS if headers.get(name)), "")
    name = headers.get(found, "")
    if len(name) > MAX_CACHE_KEY_CHARS:
        raise invalid(
            f"the header {found} has {len(name)} characters: at most {MAX_CACHE_KEY_CHARS} are"
            " taken; send a hash of it",
            found,
        )
    text = headers.get(KEEP_ALIVE_HEADER)
    if text is None:
        return CallSession(name)
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        raise invalid(
            f"the header {KEEP_ALIVE_HEADER} is {text[:40]!r}: it must be a time such as 90, 30s,"
            " 10m or 1h; 0 keeps nothing",
            KEEP_ALIVE_HEADER,
        )
    return CallSession(name, min(int(match[1]) * _SECONDS[match[2]], MAX_CACHE_TTL_S))


_session: ContextVar[CallSession] = ContextVar("session")


def set_session(session: CallSession) -> None:
    """Set the session of the request that this task answers from now on."""
    _session.set(session)


def current_session() -> CallSession:
    """Return the session of the request that this task answers."""
    return _session.get(NO_SESSION)
