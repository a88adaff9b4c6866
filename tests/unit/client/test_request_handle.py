"""What a request under way gives to its reader."""

import pytest

from quadriga.client.request_handle import RequestHandle
from quadriga.client.types import StreamChunk
from quadriga.errors import NonFiniteLogits, QuadrigaError
from quadriga.wire.client import PROTOCOL_VERSION, Chunk, ErrorInfo, Generate
from tests.unit.public_messages import make_chunk, make_end

FAILURE = ErrorInfo(NonFiniteLogits.code, "no numbers")


@pytest.mark.parametrize(
    "chunks",
    [
        [make_chunk("r", 0, "Hello", [1, 2], make_end(2, error=FAILURE))],
        [make_chunk("r", 0, "Hel", [1]), make_chunk("r", 3, "lo", [2], make_end(2, error=FAILURE))],
        [
            make_chunk("r", 0, "Hello", [1, 2]),
            make_chunk("r", 5, "", [], make_end(2, error=FAILURE)),
        ],
    ],
)
async def test_the_text_before_an_error_is_the_same_however_it_was_cut(chunks: list[Chunk]) -> None:
    items: list[StreamChunk | QuadrigaError] = []
    message = Generate(PROTOCOL_VERSION, "r", "x")
    handle = RequestHandle(message, lambda _: None, items.append, None)
    for chunk in chunks:
        handle.on_chunk(chunk, 1.0)
    assert handle.done
    texts = [item for item in items if isinstance(item, StreamChunk)]
    assert "".join(item.text for item in texts) == "Hello"
    assert [token_id for item in texts for token_id in item.token_ids] == [1, 2]
    assert all(item.completion is None for item in texts)
    assert isinstance(items[-1], NonFiniteLogits) and len(items) == len(texts) + 1
