"""What a request under way gives to its reader."""

import pytest

from quadriga.client.request_handle import RequestHandle
from quadriga.client.types import StreamChunk
from quadriga.errors import NonFiniteLogits, QuadrigaError, RequestFailed
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


async def test_an_answer_has_tokens_of_one_version_of_an_adapter() -> None:
    items: list[StreamChunk | QuadrigaError] = []
    aborted: list[RequestHandle] = []
    message = Generate(PROTOCOL_VERSION, "r", "x", adapter="a")
    handle = RequestHandle(message, aborted.append, items.append, None)
    handle.use_adapter("1" * 64)
    handle.use_adapter("2" * 64)  # nothing has come of the first one
    handle.on_chunk(make_chunk("r", 0, "Hel", [1]), 1.0)
    handle.use_adapter("2" * 64)
    assert not handle.done
    handle.use_adapter("3" * 64)
    handle.on_replay(make_chunk("r", 0, "Hello", [1, 2], make_end(2)), 1.0)
    assert handle.done and aborted == [handle]
    text, error = items
    assert isinstance(text, StreamChunk) and text.text == "Hel"
    assert isinstance(error, RequestFailed)
    assert "'a' has another content by now (333333333333, not 222222222222)" in str(error)
