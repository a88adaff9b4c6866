"""Synthetic loads: traces that are generated from a few parameters."""

import math
import random
from array import array
from collections.abc import Iterator
from dataclasses import dataclass

from quadriga.errors import ConfigError
from simulator.trace import TraceRequest

MAX_LENGTH = 2**31 - 1
LENGTHS_FORM = "N, LOW:HIGH (uniform) or lognormal:MEAN:SIGMA[:MIN:MAX]"


@dataclass(frozen=True, slots=True)
class Lengths:
    """Distribution of a number of tokens: uniform from `low` to `high`, or lognormal and clipped.

    Attributes:
        mean: mean of the lognormal distribution before clipping; None: uniform.
        sigma: its sigma.
    """

    low: int
    high: int
    mean: float | None = None
    sigma: float = 0.0

    @classmethod
    def parse(cls, text: str, name: str = "length") -> "Lengths":
        """Parse "64", "16:256" or "lognormal:200:0.8:4:2048".

        Raises:
            ConfigError: names `name` and the form.
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
        num_requests: requests in all, with every turn of a chat; the last chat may be shorter.
        output_len: generated tokens of each request.
        input_len: new prompt tokens of each request; None: no segments, the prompts are texts.
        request_rate: arrivals (of chats, if there are turns) per second; infinite: all at once.
        burstiness: shape of the gamma-distributed gaps between arrivals; 1: Poisson, less:
            burstier, infinite: one arrival every 1 / request_rate seconds.
        max_concurrency: lanes of a closed loop; the next request of a lane is sent when the one
            before has ended.
        prefix_groups: groups of prompts that share a prefix of `prefix_len` tokens.
        shuffle_groups: requests of the groups come in random order, not group after group.
        turns: requests of a chat, each continuing the one before.
        think_time: seconds from the end of a request to the start of the one that follows it.
        num_clients: clients, over which the chats are spread in turn.

    Raises:
        ConfigError: a value is out of range.
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
