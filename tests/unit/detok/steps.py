"""Steps of a detokenizer for tests, and what it makes of them."""

import math
from collections.abc import Sequence

from detok_proc.detokenizer import Deliveries, Detokenizer
from quadriga.wire.client import Chunk, End, ErrorInfo
from quadriga.wire.packing import pack_ids
from quadriga.wire.to_detok import StepOutput, StreamEnd, StreamStart
from tests.unit.tiny_vocabulary import TOKENIZER

ALICE, BOB = b"alice", b"bob"
NOW = 1000.0


EOS: int = TOKENIZER.token_to_id("<eos>")  # type: ignore[assignment]


def ids(text: str) -> list[int]:
    token_ids: list[int] = TOKENIZER.encode(text).ids
    return token_ids


def detokenizer(interval: int = 1) -> Detokenizer:
    return Detokenizer(TOKENIZER, interval, clock=lambda: NOW, slice_s=math.inf)


def opening(
    seq: int = 1,
    client: bytes = ALICE,
    stream: bool = True,
    skip: bool = True,
    stops: Sequence[str] = (),
) -> StreamStart:
    return StreamStart(seq, client, f"r{seq}", stream, skip, list(stops))


def closing(
    seq: int = 1,
    client: bytes = ALICE,
    reason: str = "length",
    matched: int | None = None,
    error: ErrorInfo | None = None,
) -> StreamEnd:
    return StreamEnd(seq, client, f"r{seq}", reason, matched, error, 7, 3, 1.0, 2.0, 3.0, 4.0)


def step(
    opened: Sequence[StreamStart] = (),
    tokens: Sequence[tuple[int, int]] = (),
    closed: Sequence[StreamEnd] = (),
    time: float = 5.0,
) -> StepOutput:
    """Return a step with (seq, id) pairs as tokens."""
    packed = pack_ids(token_id for _, token_id in tokens)
    return StepOutput(time, list(opened), [seq for seq, _ in tokens], packed, list(closed))


def only_chunk(deliveries: Deliveries, client: bytes = ALICE) -> Chunk:
    (chunk,) = deliveries.by_client[client]
    assert len(deliveries.by_client) == 1
    return chunk


def end_of(chunk: Chunk) -> End:
    assert chunk.end is not None
    return chunk.end


def play(core: Detokenizer, steps: Sequence[StepOutput]) -> tuple[list[Chunk], list[int]]:
    """Return (all chunks, all stops found) of several steps."""
    chunks: list[Chunk] = []
    stops: list[int] = []
    for output in steps:
        deliveries = core.process(output)
        while True:
            chunks += [chunk for sent in deliveries.by_client.values() for chunk in sent]
            stops += deliveries.stop_found
            if not core.has_work:
                break
            deliveries = core.work()
    return chunks, stops
