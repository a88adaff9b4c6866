"""The duration of a step in ms, as a linear function of a few features of its plan.

Every feature is work that a step does for certain, and every coefficient is the ms of one unit of
that work, which is not negative. `python -m bench.simulate.fit_cost_model` fits the coefficients to
the real worker. They are stored as JSON, with the worker that they were measured on.
"""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from quadriga.errors import ConfigError

Ints = npt.NDArray[np.int64]

READ_BOUND_TOKENS = 12  # are multiplied in the time in which the weights are read
DEFAULT = Path(__file__).resolve().parent / "cost_models" / "smollm2-135m-cpu.json"


class MeasuredOn(msgspec.Struct, frozen=True, kw_only=True):
    """The worker that steps were measured on.

    Attributes:
        max_total_tokens: tokens in its KV pool with default flags.
        window: tokens that every layer's attention is limited to; 0 if a layer sees all.
    """

    model: str
    dtype: str
    device: str
    threads: int
    date: str
    vocab_size: int
    context_length: int
    max_total_tokens: int
    command: str = ""
    window: int = 0


class Features(msgspec.Struct, frozen=True, array_like=True):
    """Amount of each kind of work in a step.

    Attributes:
        extends: 1 if a row has more than one token.
        tokens_beyond: tokens beyond READ_BOUND_TOKENS, which take additional time.
        samples: rows that sample a token.
        decode_keys: keys that the rows of one token attend to, with their own.
        extend_pairs: pairs of a token of the other rows and a key that it attends to.
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


def features_of(num_tokens: Ints, computed: Ints, samples: int, window: int = 0) -> Features:
    """Return the features of a step in which `samples` rows sample a token.

    `num_tokens` [rows] are computed after `computed` [rows] earlier tokens. A token sees at most
    `window` keys, its own included; 0: all.
    """
    if window:
        return _windowed_features(num_tokens, computed, samples, window)
    rows, tokens, context = len(num_tokens), int(num_tokens.sum()), int(computed.sum())
    beyond = max(0, tokens - READ_BOUND_TOKENS)
    if tokens == rows:
        return Features(1, 0, rows, tokens, beyond, samples, context + rows, 0)
    many = num_tokens > 1
    count, before = num_tokens[many], computed[many]
    decode_keys = context - int(before.sum()) + rows - len(count)
    pairs = int((count * before).sum() + (count * (count + 1) // 2).sum())
    return Features(1, 1, rows, tokens, beyond, samples, decode_keys, pairs)


def _windowed_features(num_tokens: Ints, computed: Ints, samples: int, window: int) -> Features:
    num_growing = np.clip(window - computed, 0, num_tokens)  # tokens that see all before them
    keys = num_growing * computed + num_growing * (num_growing + 1) // 2
    keys += (num_tokens - num_growing) * window
    rows, tokens, many = len(num_tokens), int(num_tokens.sum()), num_tokens > 1
    return Features(
        steps=1,
        extends=int(many.any()),
        rows=rows,
        tokens=tokens,
        tokens_beyond=max(0, tokens - READ_BOUND_TOKENS),
        samples=samples,
        decode_keys=int(keys[~many].sum()),
        extend_pairs=int(keys[many].sum()),
    )


class Delays(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Delays outside the steps, in ms.

    Attributes:
        message_in: from a client's send until the scheduler has the tokenized request.
        plan: from sending a plan until an idle worker begins with it.
        gap: between two steps, if the worker already has the second plan.
        result: from a step's end until the scheduler has the result.
        delivery: from a step's end until the client has its tokens.
    """

    message_in: float = 0.0
    plan: float = 0.0
    gap: float = 0.0
    result: float = 0.0
    delivery: float = 0.0


class AdapterCosts(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What adapters take, in ms.

    Attributes:
        step: more time of a step in which a row has one.
        each: more time of a step for each adapter that its rows have.
        load: until the worker has loaded one, while it computes steps.
    """

    step: float = 0.0
    each: float = 0.0
    load: float = 0.0


class Fit(msgspec.Struct, frozen=True, kw_only=True):
    """Quality of a fit: percentiles of |predicted / measured - 1| over the measured plans."""

    plans: int
    median_error: float
    p90_error: float


class CostModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Durations of steps and delays.

    Attributes:
        ms: duration of one unit of each feature, in a worker without other processes.
        slowdown: duration of a step in a server, relative to that.
    """

    ms: dict[str, float]
    measured_on: MeasuredOn
    slowdown: float = 1.0
    delays_ms: Delays = Delays()
    adapters_ms: AdapterCosts = AdapterCosts()
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
        """Return the ms of a step in a worker without other processes."""
        amounts = zip(FEATURES, msgspec.structs.astuple(features), strict=True)
        return float(sum(self.ms.get(name, 0.0) * amount for name, amount in amounts))


def load(path: Path) -> CostModel:
    """Read a cost model, or raise ConfigError."""
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
    """Write a cost model."""
    document: Any = msgspec.json.format(msgspec.json.encode(model), indent=2)
    path.write_bytes(document + b"\n")
