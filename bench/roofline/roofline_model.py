"""Compute the minimum time of a step from bytes and operations (a roofline model).

Every product reads its weights once, and every row its keys and values once, at the speed of
memory. Of the experts only those are read that a row chooses. Each multiplication and addition is
an operation at the rate of the model's own products. The longer of the two times counts, product by
product. Norms, activations and data in the caches are free.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from bench.worker_steps import Row


class StepPart(Enum):
    """Part of a step; the value is its name in tables."""

    LINEARS = "linears"
    HEAD = "head, sampling"
    ATTENTION = "attention"


@dataclass(frozen=True, slots=True)
class Product:
    """A matrix of the model, [inputs, outputs].

    Attributes:
        sampled: only the rows that sample are multiplied, as it comes after the last layer's keys
            and values. Its speed is that of the other products of its shape.
        head: the product gives the logits.
        num_experts: matrices of this shape, of which each row is multiplied by `num_chosen`.
        num_chosen: experts of a row.
    """

    inputs: int
    outputs: int
    sampled: bool = field(default=False, compare=False)
    head: bool = False
    num_experts: int = field(default=1, compare=False)
    num_chosen: int = field(default=1, compare=False)

    @property
    def weights(self) -> int:
        """Number of weights of a matrix."""
        return self.inputs * self.outputs

    def operations(self, rows: int) -> int:
        """Return the multiplications and additions for `rows` rows of one matrix."""
        return 2 * rows * self.weights

    def matrices_read(self, rows: int) -> float:
        """Return the expected number of experts that `rows` rows choose, each at random."""
        left_out = (1 - self.num_chosen / self.num_experts) ** rows
        return self.num_experts * (1 - left_out)


@dataclass(frozen=True, slots=True)
class Work:
    """The products and the attention that a model computes in a step.

    Attributes:
        products: products of all layers.
        attention: (query heads * head_dim, key heads * head_dim) of each layer.
        weight_bytes: bytes of one weight in memory.
        kv_bytes: bytes of one number in the KV cache.
    """

    products: tuple[Product, ...]
    attention: tuple[tuple[int, int], ...]
    weight_bytes: float
    kv_bytes: float


@dataclass(frozen=True, slots=True)
class Speed:
    """Speed of a machine: of reading memory, and operations/s of each product."""

    bytes_per_s: float
    rates: Mapping[Product, float]

    @property
    def highest_rate(self) -> float:
        """Operations/s of the fastest product."""
        return max(self.rates.values())


def floor(work: Work, rows: Sequence[Row], speed: Speed) -> dict[StepPart, float]:
    """Return the minimum seconds of each part of a step."""
    least, last = dict.fromkeys(StepPart, 0.0), len(work.attention) - 1
    for product in work.products:
        part = StepPart.HEAD if product.head else StepPart.LINEARS
        matrices = product.matrices_read(num_rows(product, rows))
        reading = matrices * product.weights * work.weight_bytes / speed.bytes_per_s
        least[part] += max(reading, product_seconds(product, rows, speed))
    for layer, (query_width, kv_width) in enumerate(work.attention):
        reading = 2 * kv_width * work.kv_bytes * keys_read(rows) / speed.bytes_per_s
        seen = sampled_pairs(rows) if layer == last else pairs(rows)
        counting = 4 * query_width * seen / speed.highest_rate
        least[StepPart.ATTENTION] += max(reading, counting)
    return least


def at_the_rate(work: Work, rows: Sequence[Row], speed: Speed) -> float:
    """Return the seconds of all products with infinitely fast memory."""
    return sum(product_seconds(product, rows, speed) for product in work.products)


def product_seconds(product: Product, rows: Sequence[Row], speed: Speed) -> float:
    """Return the seconds of a product at the rate of its operations."""
    count = num_rows(product, rows) * product.num_chosen
    return product.operations(count) / speed.rates[product]


def num_rows(product: Product, rows: Sequence[Row]) -> int:
    """Return the rows of a product's input."""
    return sum(row.ends if product.sampled else row.tokens for row in rows)


def keys_read(rows: Sequence[Row]) -> int:
    """Return the tokens whose keys and values a layer reads; those of the step are in the cache."""
    return sum(row.context for row in rows)


def pairs(rows: Sequence[Row]) -> int:
    """Return the number of pairs of a token and a token that it attends to."""
    return sum(row.tokens * row.context + row.tokens * (row.tokens + 1) // 2 for row in rows)


def sampled_pairs(rows: Sequence[Row]) -> int:
    """Return the number of pairs of the tokens after which a row samples."""
    return sum(row.ends * (row.context + row.tokens) for row in rows)
