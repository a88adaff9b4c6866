"""Loads in the files of others: ShareGPT's conversations, Mooncake's and Azure's traces."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec

from quadriga.errors import ConfigError
from simulator.trace import Count, Index, TraceRequest, parse_lines, read_trace

# Take prompts from a file in ShareGPT's format.
#
# The file is a JSON list of objects, each with `conversations`, a list of `{"from": ..., "value":
# ...}`.

# The limits are those of other bench clients, so that all use the same conversations of a file.
MIN_TOKENS = 4  # of a prompt, and of an answer
MAX_PROMPT_TOKENS = 1024
MAX_TOKENS = 2048  # of prompt and answer together


class Exchange(NamedTuple):
    """The first two turns of a conversation."""

    prompt: str
    answer: str


class Sample(NamedTuple):
    """A prompt, and the number of tokens of its answer in the file."""

    prompt: str
    answer_tokens: int


class _Turn(msgspec.Struct):
    value: str


class _Conversation(msgspec.Struct):
    conversations: list[_Turn] = []


def read_sharegpt(path: Path) -> list[Exchange]:
    """Return the exchanges of a file, or raise ConfigError."""
    try:
        conversations: Any = msgspec.json.decode(path.read_bytes(), type=list[_Conversation])
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except msgspec.DecodeError as error:
        raise ConfigError(
            f'{path} is no list of {{"conversations": [{{"from", "value"}}, ...]}}: {error}'
        ) from None
    turns = [conversation.conversations for conversation in conversations]
    exchanges = [Exchange(t[0].value, t[1].value) for t in turns if len(t) >= 2]
    if not exchanges:
        raise ConfigError(f"{path} has no conversation of two turns")
    return exchanges


def sample(
    exchanges: list[Exchange], count: int, count_tokens: Callable[[str], int], seed: int
) -> list[Sample]:
    """Return `count` exchanges in random order, the same for the same seed, none twice.

    Raises:
        ConfigError: too few exchanges are within the limits of length.
    """
    shuffled = random.Random(f"{seed}/conversations").sample(exchanges, len(exchanges))
    usable = _usable(shuffled, count_tokens)
    samples = list(islice(usable, count))
    if len(samples) < count:
        raise ConfigError(
            f"the file has {len(samples)} conversations of a usable length (prompts of {MIN_TOKENS}"
            f" to {MAX_PROMPT_TOKENS} tokens, {MAX_TOKENS} with the answer), and {count} are"
            " needed: lower --num-requests"
        )
    return samples


def _usable(exchanges: list[Exchange], count_tokens: Callable[[str], int]) -> Iterator[Sample]:
    for exchange in exchanges:
        prompt, answer = count_tokens(exchange.prompt), count_tokens(exchange.answer)
        fits = prompt <= MAX_PROMPT_TOKENS and prompt + answer <= MAX_TOKENS
        if fits and min(prompt, answer) >= MIN_TOKENS:
            yield Sample(exchange.prompt, answer)


# Read traces in the format in which Mooncake's were published.
#
# Each line is a JSON object with `timestamp` (ms), `input_length`, `output_length` and
# `hash_ids`, one for every 512 tokens of the prompt. Equal ids stand for equal tokens, so that
# prompts share the prefixes that they shared in the recorded system.

BLOCK_TOKENS = 512  # per hash id

# Azure's traces are tables with the time of each request and two numbers of tokens. No text is
# known to be shared, so that each prompt is taken to be another one.

AZURE_HEADER = b"TIMESTAMP,ContextTokens,GeneratedTokens"


class _Line(msgspec.Struct):
    timestamp: Annotated[float, msgspec.Meta(ge=0)]
    input_length: Count
    output_length: Count
    hash_ids: list[Index]


def read_requests(path: Path) -> list[TraceRequest]:
    """Return the requests of a file in ours, Mooncake's or Azure's format, by its first line.

    Raises:
        ConfigError: as read_trace.
    """
    try:
        with path.open("rb") as file:
            first = file.readline()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    if first.strip() == AZURE_HEADER:
        return _read_azure(path)
    if b'"hash_ids"' not in first:
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


def _read_azure(path: Path) -> list[TraceRequest]:
    """Return the requests of a table; the first one comes at 0 s."""
    began_at: datetime | None = None

    def parse(line: bytes, index: int) -> TraceRequest | None:
        nonlocal began_at
        if index == 0 or not line.strip():
            return None
        when, prompt, generated = line.decode().strip().split(",")
        at = datetime.fromisoformat(when[:26])  # the digits beyond are not of a microsecond
        began_at = began_at or at
        lengths = [[index, int(prompt)]], max(1, int(generated))
        return msgspec.convert(
            {"at": (at - began_at).total_seconds(), "segments": lengths[0],
             "max_new_tokens": lengths[1]}, TraceRequest,
        )  # fmt: skip

    requests = [request for request in parse_lines(path, parse) if request is not None]
    if not requests:
        raise ConfigError(f"{path} has no requests")
    return requests


# Play a trace at another speed, for a server of another size.


@dataclass(frozen=True, slots=True)
class TracePace:
    """How a trace is played.

    Attributes:
        speed: times between requests are divided by this.
        copies: so many copies of the trace run at one time. Each begins at another point of it, at
            equal distances, and shares prefixes with itself only.
        seconds: how long each copy is played, from its start; None: once through.
    """

    speed: float = 1.0
    copies: int = 1
    seconds: float | None = None

    def __post_init__(self) -> None:
        for name in ("speed", "copies", "seconds"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"--trace-{name} must be positive (it is {value})")

    def play(self, requests: list[TraceRequest]) -> list[TraceRequest]:
        """Return the requests of all copies, in the order of their times.

        Raises:
            ConfigError: requests follow others, so that their times are not known.
        """
        if self == TracePace():
            return requests
        if any(request.follows is not None for request in requests):
            raise ConfigError("a trace with `follows` has no times of its own to change")
        length = requests[-1].at - requests[0].at
        first_of_copy = 1 + max(segment for request in requests for segment, _ in request.segments)
        played = []
        for copy in range(self.copies):
            begin = length * copy / self.copies
            for request in requests:
                at = (request.at - requests[0].at - begin) % (length or 1.0) / self.speed
                if self.seconds is None or at < self.seconds:
                    segments = tuple((s + copy * first_of_copy, n) for s, n in request.segments)
                    played.append(msgspec.structs.replace(request, at=at, segments=segments))
        return sorted(played, key=lambda request: request.at)
