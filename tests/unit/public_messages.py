"""Messages of a frontend to a client, for servers that tests script."""

from collections.abc import Sequence

from quadriga.wire.client import Chunk, End, ErrorInfo, StageTimes, Usage
from quadriga.wire.packing import pack_ids


def make_chunk(
    request_id: str,
    offset: int,
    text: str,
    ids: Sequence[int],
    end: End | None = None,
    index: int = 0,
    at: float = 1.0,
) -> Chunk:
    """Make a chunk whose text begins at `offset`; its tokens were generated at the time `at`."""
    return Chunk(request_id, offset, text, pack_ids(ids), [at] * len(ids), end, index)


def make_end(
    num_tokens: int,
    reason: str = "stop",
    error: ErrorInfo | None = None,
    num_prompt_tokens: int = 1,
    at: float = 1.0,
) -> End:
    """Make the end of a request that reached every stage at the time `at`.

    An error makes the reason "error".
    """
    if error is not None:
        reason = "error"
    return End(
        reason, Usage(num_prompt_tokens, num_tokens), StageTimes(at, at, at, at, at), None, error
    )
