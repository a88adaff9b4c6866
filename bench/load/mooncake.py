"""Read traces in the format in which Mooncake's were published.

Each line is a JSON object with `timestamp` (ms), `input_length`, `output_length` and `hash_ids`,
one for every 512 tokens of the prompt. Equal ids stand for equal tokens, so that prompts share the
prefixes that they shared in the recorded system.
"""

from pathlib import Path
from typing import Annotated

import msgspec

from bench.load.trace import Count, Index, TraceRequest, parse_lines, read_trace
from quadriga.errors import ConfigError

BLOCK_TOKENS = 512  # per hash id


class _Line(msgspec.Struct):
    timestamp: Annotated[float, msgspec.Meta(ge=0)]
    input_length: Count
    output_length: Count
    hash_ids: list[Index]


def read_requests(path: Path) -> list[TraceRequest]:
    """Return the requests of a file in this format or in ours; raise ConfigError as read_trace."""
    try:
        with path.open("rb") as file:
            is_ours = b'"hash_ids"' not in file.readline()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    if is_ours:
        return read_trace(path)
    decode = msgspec.json.Decoder(_Line).decode
    return parse_lines(path, lambda line, _: _request(decode(line)))


def _request(line: _Line) -> TraceRequest:
    blocks = -(-line.input_length // BLOCK_TOKENS)
    if len(line.hash_ids) != blocks:
        raise ValueError(
            f"`hash_ids` has {len(line.hash_ids)} ids: {line.input_length} tokens are {blocks}"
            f" blocks of {BLOCK_TOKENS}"
        )
    lengths = [BLOCK_TOKENS] * (blocks - 1) + [line.input_length - BLOCK_TOKENS * (blocks - 1)]
    segments = tuple(zip(line.hash_ids, lengths, strict=True))
    return TraceRequest(line.timestamp / 1000, segments, line.output_length)
