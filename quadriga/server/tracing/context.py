"""W3C Trace Context (https://www.w3.org/TR/trace-context/): the header `traceparent`."""

import random
import re

from quadriga.wire.trace import TraceContext

HEADER = "traceparent"
MAX_CHARS = 256  # of the header of a later version, whose further fields are skipped
_SAMPLED = 0x01
_VERSION_0 = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})", re.ASCII)
_LATER = re.compile(
    r"(?!ff)[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(?:-.*)?", re.ASCII
)


def continued(traceparent: str) -> TraceContext | None:
    """Return a new span's place below the span that a `traceparent` names.

    None for a malformed one, which the standard wants to be ignored.
    """
    text = traceparent.strip()
    if len(text) > MAX_CHARS:
        return None
    match = _VERSION_0.fullmatch(text)
    if match is None and not text.startswith("00"):
        match = _LATER.fullmatch(text)
    if match is None:
        return None
    trace_id, parent_id, flags = match.groups()
    if not int(trace_id, 16) or not int(parent_id, 16):
        return None
    return TraceContext(trace_id, new_span_id(), parent_id, bool(int(flags, 16) & _SAMPLED))


def started(sampled: bool) -> TraceContext:
    """Return the first span of a new trace."""
    trace_id = f"{random.getrandbits(128) or 1:032x}"
    return TraceContext(trace_id, new_span_id(), "", sampled)


def traceparent_of(context: TraceContext) -> str:
    """Return the `traceparent` that names a span as the parent of others."""
    return f"00-{context.trace_id}-{context.span_id}-{int(context.sampled):02x}"


def new_span_id() -> str:
    """Return 16 random hexadecimal digits, not all 0."""
    return f"{random.getrandbits(64) or 1:016x}"


class HeadSampling:
    """Decide at a request's arrival whether it is traced.

    Args:
        ratio: share of the requests without a valid traceparent that are sampled.
        keeps_all: requests that are not sampled are traced, too, but not exported.
    """

    def __init__(self, ratio: float, keeps_all: bool) -> None:
        self._ratio = ratio
        self._keeps_all = keeps_all
        self.is_off = not ratio and not keeps_all

    def context(self, traceparent: str) -> TraceContext | None:
        """Return the context of a request that is traced, else None.

        The decision of the caller whose `traceparent` came with the request is kept.
        """
        context = continued(traceparent) if traceparent else None
        if context is None:
            sampled = bool(self._ratio) and random.random() < self._ratio
            return started(sampled) if sampled or self._keeps_all else None
        return context if context.sampled or self._keeps_all else None
