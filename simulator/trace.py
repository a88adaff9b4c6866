"""Traces: the requests of a load and their times, as a file.

A trace file has one JSON object per line with the fields of TraceRequest; fields at their default
are left out. Requests refer to each other by their position in the trace, from 0.
"""

import random
from array import array
from collections.abc import Callable, Iterable
from functools import lru_cache
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec

from quadriga.errors import ConfigError
from quadriga.sampling.params import LIMITS

# Lower ids are special tokens in many vocabularies, and are not drawn.
MIN_TOKEN_ID = 3
NUM_CACHED_SEGMENTS = 4096

RequestT = TypeVar("RequestT")
Index = Annotated[int, msgspec.Meta(ge=0)]
Count = Annotated[int, msgspec.Meta(ge=1)]
Seconds = Annotated[float, msgspec.Meta(ge=0)]
Priority = Annotated[
    int, msgspec.Meta(ge=LIMITS["priority"].minimum, le=LIMITS["priority"].maximum)
]


class TraceRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One request.

    Attributes:
        at: seconds after the start of the run; with `follows`: after the end of that request.
        segments: pairs of segment id and number of tokens, whose concatenation is the prompt. Equal
            ids are equal text, so that prompts can share a prefix.
        client: requests of one client share a connection.
        follows: earlier request of the trace, after whose end this one is sent.
        ttft_target: seconds within which the first token is wanted, as in SamplingParams.
        keep_s: seconds for which its prefix stays cached after its last use, as in CacheHint, under
            the name of its client; 0: as long as there is room.
        adapter: name of the adapter that it needs; "": none.
        continues: with `follows`: the prompt and the generated tokens of that request precede this
            one's segments, as in the next turn of a chat. False: only the time depends on it.
        ids: literal token ids, in place of segments.
    """

    at: Seconds
    segments: tuple[tuple[Index, Count], ...]
    max_new_tokens: Count
    client: Index = 0
    priority: Priority = 0
    follows: Index | None = None
    ids: tuple[Index, ...] = ()
    continues: bool = True
    ttft_target: Annotated[float, msgspec.Meta(gt=0)] | None = None
    keep_s: Seconds = 0.0
    adapter: str = ""

    @property
    def num_own_tokens(self) -> int:
        """Number of prompt tokens, without those of a request that it continues."""
        return len(self.ids) + sum(tokens for _, tokens in self.segments)

    @property
    def predecessor(self) -> int | None:
        """The request whose tokens precede this one's, or None."""
        return self.follows if self.continues else None


# --- prompts --------------------------------------------------------------------------------------


def prompt_ids(request: TraceRequest, vocab_size: int, seed: int | str) -> "array[int]":
    """Return the prompt tokens of a request, without those of a request that it continues.

    A segment depends on seed and segment id alone; of two lengths of one id, the shorter one is a
    prefix of the longer one.
    """
    ids = array("i", request.ids)
    for segment, tokens in request.segments:
        ids.extend(_segment(seed, segment, tokens, vocab_size))
    return ids


@lru_cache(NUM_CACHED_SEGMENTS)
def _segment(seed: int | str, segment: int, tokens: int, vocab_size: int) -> "array[int]":
    draw = random.Random(f"{seed}/{segment}").random
    drawable = vocab_size - MIN_TOKEN_ID
    return array("i", [MIN_TOKEN_ID + int(draw() * drawable) for _ in range(tokens)])


# --- files ----------------------------------------------------------------------------------------


def write_trace(path: Path, requests: Iterable[TraceRequest]) -> None:
    """Write the requests, one per line."""
    encode = msgspec.json.Encoder().encode
    with path.open("wb") as file:
        for request in requests:
            file.write(encode(request) + b"\n")


def read_trace(path: Path) -> list[TraceRequest]:
    """Return the requests of a file, or raise ConfigError."""
    decode = msgspec.json.Decoder(TraceRequest).decode

    def parse(line: bytes, index: int) -> TraceRequest:
        request = decode(line)
        _check(request, index)
        return request

    requests = parse_lines(path, parse)
    if not requests:
        raise ConfigError(f"{path} has no requests")
    return requests


def parse_lines(path: Path, parse: Callable[[bytes, int], RequestT]) -> list[RequestT]:
    """Return what `parse(line, index)` makes of each line.

    Raises:
        ConfigError: the file cannot be read, or `parse` raised DecodeError or ValueError.
    """
    requests: list[RequestT] = []
    try:
        with path.open("rb") as file:
            for index, line in enumerate(file):
                requests.append(parse(line, index))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except (msgspec.DecodeError, ValueError) as error:
        raise ConfigError(f"{path}, line {len(requests) + 1}: {error}") from None
    return requests


def _check(request: TraceRequest, index: int) -> None:
    if request.follows is not None and request.follows >= index:
        raise ValueError(
            f"`follows` is {request.follows}: it must name an earlier request, and this is {index}"
        )
    if request.ids and request.segments:
        raise ValueError("`ids` stand in place of `segments`: one of the two must be empty")
    if request.num_own_tokens == 0 and request.predecessor is None:
        raise ValueError("`segments` is empty, and so is `ids`: the prompt has no token")
