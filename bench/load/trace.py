"""Traces: the requests of a load and their times, as a file and as a generator.

A trace file has one JSON object per line with the fields of TraceRequest; fields at their default
are left out. Requests refer to each other by their position in the trace, from 0.
"""

import dataclasses
import math
import random
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

import msgspec

from quadriga.errors import ConfigError
from quadriga.sampling.limits import LIMITS

# Lower ids are special tokens in many vocabularies, and are not drawn.
MIN_TOKEN_ID = 3
MAX_LENGTH = 2**31 - 1
NUM_CACHED_SEGMENTS = 4096
LENGTHS_FORM = "N, LOW:HIGH (uniform) or lognormal:MEAN:SIGMA[:MIN:MAX]"

Index = Annotated[int, msgspec.Meta(ge=0)]
Count = Annotated[int, msgspec.Meta(ge=1)]
Seconds = Annotated[float, msgspec.Meta(ge=0)]
Priority = Annotated[
    int, msgspec.Meta(ge=LIMITS["priority"].minimum, le=LIMITS["priority"].maximum)
]


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request.

    Attributes:
        at: Seconds after the start of the run; with `follows`: after the end of that request.
        segments: Pairs of segment id and number of tokens, whose concatenation is the prompt. Equal
            ids are equal text, so that prompts can share a prefix.
        client: Requests of one client share a connection.
        follows: Earlier request of the trace, after whose end this one is sent.
        continues: With `follows`: the prompt and the generated tokens of that request precede this
            one's segments, as in the next turn of a chat. False: only the time depends on it.
        ids: Literal token ids, in place of segments.
    """

    at: Seconds
    segments: tuple[tuple[Index, Count], ...]
    max_new_tokens: Count
    client: Index = 0
    priority: Priority = 0
    follows: Index | None = None
    ids: tuple[Index, ...] = ()
    continues: bool = True

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

_Line: Any = msgspec.defstruct(
    "_Line",
    [
        (f.name, f.type) if f.default is dataclasses.MISSING else (f.name, f.type, f.default)
        for f in dataclasses.fields(TraceRequest)
    ],
    forbid_unknown_fields=True,
    omit_defaults=True,
)


def write_trace(path: Path, requests: Iterable[TraceRequest]) -> None:
    """Write the requests, one per line."""
    encode = msgspec.json.Encoder().encode
    with path.open("wb") as file:
        for request in requests:
            file.write(encode(_Line(*_values(request))) + b"\n")


def read_trace(path: Path) -> list[TraceRequest]:
    """Return the requests of a file, or raise ConfigError."""
    decode = msgspec.json.Decoder(_Line).decode
    requests: list[TraceRequest] = []
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                try:
                    request = TraceRequest(*_values(decode(line)))
                    _check(request, index=len(requests))
                except (msgspec.DecodeError, ValueError) as error:
                    raise ConfigError(f"{path}, line {number}: {error}") from None
                requests.append(request)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    if not requests:
        raise ConfigError(f"{path} has no requests")
    return requests


def _values(request: Any) -> list[Any]:
    return [getattr(request, field.name) for field in dataclasses.fields(TraceRequest)]


def _check(request: TraceRequest, index: int) -> None:
    if request.follows is not None and request.follows >= index:
        raise ValueError(
            f"`follows` is {request.follows}: it must name an earlier request, and this is {index}"
        )
    if request.ids and request.segments:
        raise ValueError("`ids` stand in place of `segments`: one of the two must be empty")
    if request.num_own_tokens == 0 and request.predecessor is None:
        raise ValueError("`segments` is empty, and so is `ids`: the prompt has no token")


# --- generator ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Lengths:
    """Distribution of a number of tokens: uniform from `low` to `high`, or lognormal and clipped.

    Attributes:
        mean: Mean of the lognormal distribution before clipping; None: uniform.
        sigma: Its sigma.
    """

    low: int
    high: int
    mean: float | None = None
    sigma: float = 0.0

    @classmethod
    def parse(cls, text: str, name: str = "length") -> "Lengths":
        """Parse "64", "16:256" or "lognormal:200:0.8:4:2048".

        Raises:
            ConfigError: Names `name` and the form.
        """
        try:
            lengths = cls._of_parts(text.split(":"))
        except (ValueError, TypeError):
            raise ConfigError(f"{name} is {text!r}: it must be {LENGTHS_FORM}") from None
        if lengths.low < 1 or (lengths.mean is not None and not lengths.mean > 0):
            raise ConfigError(f"{name} must be positive (it is {text})")
        if lengths.low > lengths.high:
            raise ConfigError(f"{name} is {text!r}: {lengths.low} is more than {lengths.high}")
        if not (0 <= lengths.sigma < math.inf and (lengths.mean or 0.0) < math.inf):
            raise ConfigError(f"{name} is {text!r}: mean and sigma must be finite, sigma 0 or more")
        return lengths

    @classmethod
    def _of_parts(cls, parts: list[str]) -> "Lengths":
        if parts[0] == "lognormal":
            mean, sigma, *limits = parts[1:]
            low, high = (int(limit) for limit in limits) if limits else (1, MAX_LENGTH)
            return cls(low, high, float(mean), float(sigma))
        low, high = (int(part) for part in (parts if len(parts) > 1 else parts * 2))
        return cls(low, high)

    def draw(self, source: random.Random) -> int:
        """Draw one length in tokens."""
        if self.mean is None:
            return source.randint(self.low, self.high)
        drawn = source.lognormvariate(math.log(self.mean) - self.sigma**2 / 2, self.sigma)
        return min(max(round(min(drawn, MAX_LENGTH)), self.low), self.high)


@dataclass(frozen=True, slots=True)
class TraceSpec:
    """Parameters of a generated trace.

    Attributes:
        num_requests: Requests in all, with every turn of a chat; the last chat may be shorter.
        output_len: Generated tokens of each request.
        input_len: New prompt tokens of each request; None: no segments, the prompts are texts.
        request_rate: Arrivals (of chats, if there are turns) per second; infinite: all at once.
        burstiness: Shape of the gamma-distributed gaps between arrivals; 1: Poisson, less:
            burstier, infinite: one arrival every 1 / request_rate seconds.
        max_concurrency: Lanes of a closed loop; the next request of a lane is sent when the one
            before has ended.
        prefix_groups: Groups of prompts that share a prefix of `prefix_len` tokens.
        shuffle_groups: Requests of the groups come in random order, not group after group.
        turns: Requests of a chat, each continuing the one before.
        think_time: Seconds from the end of a request to the start of the one that follows it.
        num_clients: Clients, over which the chats are spread in turn.

    Raises:
        ConfigError: A value is out of range.
    """

    num_requests: int
    output_len: Lengths
    input_len: Lengths | None = None
    request_rate: float = math.inf
    burstiness: float = 1.0
    max_concurrency: int | None = None
    prefix_groups: int = 0
    prefix_len: int = 0
    shuffle_groups: bool = True
    turns: int = 1
    think_time: float = 0.0
    num_clients: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        positive = ("num_requests", "request_rate", "burstiness", "max_concurrency", "turns")
        for name in (*positive, "num_clients"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"{name} must be positive (it is {value})")
        for name in ("prefix_groups", "prefix_len", "think_time"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"{name} must be 0 or more (it is {getattr(self, name)})")
        if (self.prefix_groups == 0) != (self.prefix_len == 0):
            raise ConfigError("prefix_groups and prefix_len go together: give both, or none")
        if self.max_concurrency is not None and self.request_rate < math.inf:
            raise ConfigError(
                "max_concurrency is a closed loop, which has no request_rate: give one of the two"
            )

    @property
    def num_chats(self) -> int:
        """Number of chats, the last of which may be shorter."""
        return -(-self.num_requests // self.turns)


def generate(spec: TraceSpec) -> Iterator[TraceRequest]:
    """Yield the requests, the same for the same spec.

    Requests that follow no other are sorted by `at`.
    """
    inputs, outputs = (random.Random(f"{spec.seed}/{name}") for name in ("inputs", "outputs"))
    arrivals, groups = _arrivals(spec), _groups(spec)
    for index in range(spec.num_requests):
        chat, turn = divmod(index, spec.turns)
        prefix: list[tuple[int, int]] = []
        if turn == 0:
            at = next(arrivals)
            prefix = [(group, spec.prefix_len) for group in next(groups)]
        lengths = [] if spec.input_len is None else [spec.input_len.draw(inputs)]
        follows = index - 1 if turn else _end_of_lane(spec, chat)
        yield TraceRequest(
            at=at if follows is None else spec.think_time,
            segments=(*prefix, *((spec.prefix_groups + index, tokens) for tokens in lengths)),
            max_new_tokens=spec.output_len.draw(outputs),
            client=chat % spec.num_clients,
            follows=follows,
            continues=turn > 0 or follows is None,
        )


def _end_of_lane(spec: TraceSpec, chat: int) -> int | None:
    """Return the last request of the chat before this one in its lane, or None."""
    if spec.max_concurrency is None or chat < spec.max_concurrency:
        return None
    return (chat - spec.max_concurrency + 1) * spec.turns - 1


def _arrivals(spec: TraceSpec) -> Iterator[float]:
    """Yield the arrival of each chat in seconds after the start; the first one is 0."""
    source = random.Random(f"{spec.seed}/arrivals")
    at = 0.0
    for chat in range(spec.num_chats):
        if spec.burstiness == math.inf:
            yield chat / spec.request_rate
            continue
        yield at
        if spec.request_rate < math.inf:
            at += source.gammavariate(spec.burstiness, 1 / (spec.request_rate * spec.burstiness))


def _groups(spec: TraceSpec) -> Iterator[tuple[int, ...]]:
    """Yield the group of each chat as a tuple of one id, empty if there are no groups."""
    if spec.prefix_groups == 0:
        yield from (() for _ in range(spec.num_chats))
        return
    order = array("l", range(spec.num_chats))
    if spec.shuffle_groups:
        random.Random(f"{spec.seed}/groups").shuffle(order)
    for chat in order:
        yield (chat * spec.prefix_groups // spec.num_chats,)
