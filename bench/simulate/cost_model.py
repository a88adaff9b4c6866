"""What a step costs: milliseconds as a linear function of a few features of its plan.

The model is small on purpose: every feature names work that a step certainly does, every
coefficient is what one unit of that work takes in ms and therefore not negative. It is fitted to
the real worker by `python -m bench.simulate.fit_cost_model` and kept as JSON beside what it was
measured on.
"""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from bench.worker_steps import MeasuredOn
from quadriga.errors import ConfigError

Ints = npt.NDArray[np.int64]

FOLDER = Path(__file__).resolve().parent / "cost_models"
READ_BOUND_TOKENS = 12
"""Tokens that are multiplied while the weights are read."""
DEFAULT = FOLDER / "smollm2-135m-cpu.json"


class Features(msgspec.Struct, frozen=True, array_like=True):
    """How much of each kind of work a step holds.

    steps: 1. extends: 1 where a row has more than one token. tokens_beyond: those beyond
    READ_BOUND_TOKENS, which take time of their own. decode_keys: keys that the rows of one
    token see, their own one with them. extend_pairs: query tokens of the other rows x the keys that
    each of them sees.
    """

    steps: int
    extends: int
    rows: int
    tokens: int
    tokens_beyond: int
    samples: int
    decode_keys: int
    extend_pairs: int


FEATURES = Features.__struct_fields__


def features_of(num_tokens: Ints, computed: Ints, samples: int) -> Features:
    """num_tokens: [rows] tokens that each row computes. computed: [rows] tokens before them.
    samples: rows that sample a token."""
    rows, tokens, context = len(num_tokens), int(num_tokens.sum()), int(computed.sum())
    beyond = max(0, tokens - READ_BOUND_TOKENS)
    if tokens == rows:
        return Features(1, 0, rows, tokens, beyond, samples, context + rows, 0)
    many = num_tokens > 1
    count, before = num_tokens[many], computed[many]
    decode_keys = context - int(before.sum()) + rows - len(count)
    pairs = int((count * before).sum() + (count * (count + 1) // 2).sum())
    return Features(1, 1, rows, tokens, beyond, samples, decode_keys, pairs)


class Delays(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What passes outside of the steps, in ms.

    message_in: from a client's send until the scheduler has the request, tokenised.
    plan: until a worker that waits begins with a plan. gap: between two steps, where the second
    plan is there already. result: from a step's end until the scheduler knows of it.
    delivery: from a step's end until its tokens are with the client.
    """

    message_in: float = 0.0
    plan: float = 0.0
    gap: float = 0.0
    result: float = 0.0
    delivery: float = 0.0


class Fit(msgspec.Struct, frozen=True, kw_only=True):
    """How well it fits: percentiles of |predicted / measured - 1| over the `plans` measured."""

    plans: int
    median_error: float
    p90_error: float


class CostModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """ms: what one unit of each feature costs in a worker that is alone. slowdown: how many times
    as long a step takes in a server, beside the other processes."""

    ms: dict[str, float]
    measured_on: MeasuredOn
    slowdown: float = 1.0
    delays_ms: Delays = Delays()
    fit: Fit | None = None

    def __post_init__(self) -> None:
        unknown = set(self.ms) - set(FEATURES)
        if unknown:
            raise ValueError(
                f"ms has {', '.join(sorted(unknown))}: known are {', '.join(FEATURES)}"
            )

    @property
    def prices(self) -> tuple[float, ...]:
        """Seconds for one unit of each feature in a server, in the order of FEATURES."""
        return tuple(self.slowdown * self.ms.get(name, 0.0) / 1000 for name in FEATURES)

    def step_ms(self, features: Features) -> float:
        """ms of such a step in a worker that is alone."""
        return sum(self.ms.get(name, 0.0) * getattr(features, name) for name in FEATURES)


def load(path: Path) -> CostModel:
    """ConfigError where there is none, or it is not one."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=CostModel)
    except OSError as error:
        raise ConfigError(
            f"cost model {path} cannot be read: {error.strerror};"
            " python -m bench.simulate.fit_cost_model measures one"
        ) from None
    except msgspec.DecodeError as error:
        raise ConfigError(f"cost model {path}: {error}") from None


def save(path: Path, model: CostModel) -> None:
    document: Any = msgspec.json.format(msgspec.json.encode(model), indent=2)
    path.write_bytes(document + b"\n")
