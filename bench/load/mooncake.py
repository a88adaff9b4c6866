"""Traces in the format that Mooncake's were published in: a JSON object a line, with `timestamp`
(ms), `input_length`, `output_length` and `hash_ids`, one for every 512 tokens of the prompt. Equal
ids are equal tokens, so that prompts of the trace share what they shared.
"""

from pathlib import Path
from typing import Annotated

import msgspec

from bench.load.trace import Count, Index, TraceRequest, read_trace
from quadriga.errors import ConfigError

BLOCK = 512
"""Tokens of a hash id."""


class _Line(msgspec.Struct):
    timestamp: Annotated[float, msgspec.Meta(ge=0)]
    input_length: Count
    output_length: Count
    hash_ids: list[Index]


def read_requests(path: Path) -> list[TraceRequest]:
    """The requests of a file, of this format or of ours. ConfigError as of read_trace."""
    try:
        with path.open("rb") as file:
            is_ours = b'"hash_ids"' not in file.readline()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    return read_trace(path) if is_ours else _read(path)


def _read(path: Path) -> list[TraceRequest]:
    decode = msgspec.json.Decoder(_Line).decode
    requests = []
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                requests.append(_request(decode(line)))
            except (msgspec.DecodeError, ValueError) as error:
                raise ConfigError(f"{path}, line {number}: {error}") from None
    return requests


def _request(line: _Line) -> TraceRequest:
    blocks = -(-line.input_length // BLOCK)
    if len(line.hash_ids) != blocks:
        raise ValueError(
            f"`hash_ids` has {len(line.hash_ids)} ids: {line.input_length} tokens are {blocks}"
            f" blocks of {BLOCK}"
        )
    lengths = [BLOCK] * (blocks - 1) + [line.input_length - BLOCK * (blocks - 1)]
    segments = tuple(zip(line.hash_ids, lengths, strict=True))
    return TraceRequest(line.timestamp / 1000, segments, line.output_length)
