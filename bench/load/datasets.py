"""Loads in the files of others: ShareGPT's conversations and Mooncake's traces."""

import random
from collections.abc import Callable, Iterator
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
