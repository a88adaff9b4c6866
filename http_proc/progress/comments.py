"""The comments of a stream: lines that begin with a colon, which clients skip."""

from collections.abc import Sequence

from quadriga.wire.messages.to_client import RequestProgress, RequestState

NO_ANSWER = b": waiting for the server\n\n"


def furthest(values: Sequence[RequestProgress]) -> RequestProgress | None:
    """Return the progress of the request that is furthest; None without one that is known."""
    known = [value for value in values if value.state is not RequestState.UNKNOWN]
    ranks = list(RequestState)
    return max(known, key=lambda value: (ranks.index(value.state), -value.place), default=None)


def comment(value: RequestProgress | None) -> bytes:
    """Return the comment that says how far a request is; None: the ring does not know it."""
    return NO_ANSWER if value is None else f": {describe(value)}\n\n".encode()


def describe(value: RequestProgress) -> str:
    """Return how far a request is, in words."""
    if value.state is RequestState.QUEUED:
        about = "" if value.wait_s is None else f", about {max(1, round(value.wait_s))} s"
        return f"queued {value.place}{about}"
    if value.state is RequestState.PREFILL:
        return f"prefill {100 * value.num_computed_tokens // max(1, value.num_prompt_tokens)} %"
    return str(value.state.value)
