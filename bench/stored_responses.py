"""Measure the store of responses: `python -m bench.stored_responses`.

Responses of a usual size are stored one after the other, in chains, by the code of the gateway. The
growth of this process's memory, the size of the file and the times of a call are printed.
"""

import asyncio
import random
import statistics
import tempfile
from pathlib import Path

import psutil

from bench.command import command_parser
from http_proc.answer.events import TextDelta
from http_proc.apis.responses.answer import ResponseAnswer
from http_proc.apis.responses.output import ResponseOutput
from http_proc.apis.responses.schema import ResponseObject
from http_proc.apis.responses.store import EndedResponse
from http_proc.apis.responses.stored.bounds import StoreBounds
from http_proc.apis.responses.stored.response_store import StoredResponses
from http_proc.apis.responses.stream import ResponseStream
from quadriga.client.types import Completion, StreamChunk, Timings
from quadriga.clock import now
from quadriga.wire.messages.to_client import Usage

MEBIBYTE = 1024 * 1024
WORDS = ("the", "of", "and", "to", "in", "is", "it", "that", "was", "for", "on", "are", "with")
CHAIN_LENGTH, NUM_QUESTION_WORDS = 10, 30
BOUNDS = StoreBounds(1_000_000, 16 * 1024 * MEBIBYTE, 1e9)


def response_of(number: int, num_tokens: int) -> EndedResponse:
    """Return a response of random words, one a token, with its stream."""
    draw = random.Random(number)
    words = [f" {draw.choice(WORDS)}{draw.randrange(1000)}" for _ in range(num_tokens)]
    previous = f"resp_{number - 1}" if number % CHAIN_LENGTH else None
    response = ResponseObject(
        id=f"resp_{number}", created_at=int(now()), model="bench", previous_response_id=previous
    )
    pieces: list[bytes] = []
    stream = ResponseStream(
        ResponseAnswer(response, ResponseOutput(response.id, {})), pieces.append
    )
    stream.start(0)
    for word in words:
        stream.render(0, [TextDelta(word)], StreamChunk("r", word, [1], [0.0], 0.0))
    usage = Usage(NUM_QUESTION_WORDS, num_tokens, 0)
    end = Completion("r", "".join(words), [], "stop", usage, Timings(now()))
    stream.render(0, [], StreamChunk("r", "", [], [], 0.0, end))
    stream.finish()
    question = " ".join(draw.choice(WORDS) for _ in range(NUM_QUESTION_WORDS))
    asked = [{"type": "message", "role": "user", "content": question}]
    return EndedResponse(response, asked, True, None, pieces[0])


def resident_mib() -> float:
    """Return the resident memory of this process in MiB."""
    return float(psutil.Process().memory_info().rss) / MEBIBYTE


async def measure(directory: Path, count: int, num_tokens: int) -> None:
    """Store `count` responses, read some of them, and print the figures."""
    store = StoredResponses(directory / "responses.sqlite3", BOUNDS)
    await store.open()
    num_stream_bytes, times = 0, []
    for number in range(count):
        ended = response_of(number, num_tokens)
        num_stream_bytes += len(ended.events)
        began_at = now()
        assert await store.save(ended)
        times.append(1000 * (now() - began_at))
        if number == count // 100:
            first_mib = resident_mib()
    growth = resident_mib() - first_mib
    reads = []
    for number in random.Random(0).choices(range(count), k=min(count, 500)):
        began_at = now()
        await store.items_of_response(f"resp_{number}")
        reads.append(1000 * (now() - began_at))
    size = sum(file.stat().st_size for file in directory.iterdir())
    print(f"{count} responses of {num_tokens} tokens, in chains of {CHAIN_LENGTH}")
    print(f"memory: {growth:+.1f} MiB after the first hundredth, {resident_mib():.0f} MiB in all")
    print(
        f"disk: {size / MEBIBYTE:.0f} MiB, {size / count / 1024:.1f} KiB a response (its stream as"
        f" sent: {num_stream_bytes / count / 1024:.0f} KiB)"
    )
    print(f"store one: {_quantiles(times)}")
    print(f"read the items of a chain: {_quantiles(reads)}")
    await store.close()


def _quantiles(times: list[float]) -> str:
    cuts = statistics.quantiles(times, n=100)
    return f"median {cuts[49]:.2f} ms, 99th percentile {cuts[98]:.2f} ms"


def main() -> None:
    """Run the command."""
    parser = command_parser("bench.stored_responses", __doc__)
    parser.add_argument("--count", type=int, default=10_000, help="responses (default: 10000)")
    parser.add_argument("--tokens", type=int, default=200, help="of each (default: 200)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        asyncio.run(measure(Path(directory), args.count, args.tokens))


if __name__ == "__main__":
    main()
