"""The least time that a step can take: arithmetic of bytes and operations, without a measurement.

Every product reads its weights once and every row its keys and values once, at the speed at which
memory is read; each multiplication and addition counts as an operation, at the rate of the model's
own products. Of the two times the longer one counts, operation by operation. Norms, activations and
whatever else stays in the caches count as nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from bench.worker_steps import Row


class StepPart(Enum):
    """Of a step; the value is what tables call it."""

    LINEARS = "linears"
    HEAD = "head, sampling"
    ATTENTION = "attention"


@dataclass(frozen=True, slots=True)
class Product:
    """A matrix of the model, [inputs, outputs]. sampled: only rows that sample are multiplied, as
    after the last layer's keys and values no token needs another one; it is as fast as the others
    of its shape."""

    inputs: int
    outputs: int
    sampled: bool = field(default=False, compare=False)
    head: bool = False

    @property
    def weights(self) -> int:
        return self.inputs * self.outputs

    def operations(self, rows: int) -> int:
        return 2 * rows * self.weights


@dataclass(frozen=True, slots=True)
class Work:
    """What a model computes.

    products: of all layers. attention: (query heads * head_dim, key heads * head_dim) of each
    layer. weight_bytes, kv_bytes: of one number, as it is kept in memory.
    """

    products: tuple[Product, ...]
    attention: tuple[tuple[int, int], ...]
    weight_bytes: float
    kv_bytes: float


@dataclass(frozen=True, slots=True)
class Speed:
    """bytes_per_s: at which memory is read. rates: operations/s of each product."""

    bytes_per_s: float
    rates: Mapping[Product, float]

    @property
    def highest_rate(self) -> float:
        return max(self.rates.values())


def floor(work: Work, rows: Sequence[Row], speed: Speed) -> dict[StepPart, float]:
    """Seconds of each part."""
    least, last = dict.fromkeys(StepPart, 0.0), len(work.attention) - 1
    for product in work.products:
        part = StepPart.HEAD if product.head else StepPart.LINEARS
        reading = product.weights * work.weight_bytes / speed.bytes_per_s
        least[part] += max(reading, product_seconds(product, rows, speed))
    for layer, (query_width, kv_width) in enumerate(work.attention):
        reading = 2 * kv_width * work.kv_bytes * keys_read(rows) / speed.bytes_per_s
        seen = sampled_pairs(rows) if layer == last else pairs(rows)
        counting = 4 * query_width * seen / speed.highest_rate
        least[StepPart.ATTENTION] += max(reading, counting)
    return least


def at_the_rate(work: Work, rows: Sequence[Row], speed: Speed) -> float:
    """Seconds of all products, were memory infinitely fast."""
    return sum(product_seconds(product, rows, speed) for product in work.products)


def product_seconds(product: Product, rows: Sequence[Row], speed: Speed) -> float:
    """At the rate of its operations."""
    count = sum(row.ends if product.sampled else row.tokens for row in rows)
    return product.operations(count) / speed.rates[product]


def keys_read(rows: Sequence[Row]) -> int:
    """Tokens whose keys and values a layer reads. What the step itself adds to them is at hand."""
    return sum(row.context for row in rows)


def pairs(rows: Sequence[Row]) -> int:
    """Of a token and one that it sees."""
    return sum(row.tokens * row.context + row.tokens * (row.tokens + 1) // 2 for row in rows)


def sampled_pairs(rows: Sequence[Row]) -> int:
    """The same of tokens after which a row samples."""
    return sum(row.ends * (row.context + row.tokens) for row in rows)
