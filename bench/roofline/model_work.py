"""What the steps of a model have to multiply and read, taken down from the model itself."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from bench.roofline.roofline_model import Product, Work
from worker_proc.attention.base import AttentionShape
from worker_proc.models.layers import Embedding, HeadNorms, LayerNorm, Linear, RMSNorm, Rope
from worker_proc.models.ops import Ops
from worker_proc.models.registry import build_model

WEIGHT_BYTES = {"int8": 1 + 2 / 32, "int4": 0.5 + 4 / 32}
"""Of a quantised weight, with its share of what a group of 32 keeps beside them."""


def work_of(hf_config: dict[str, Any], quantization: str, number_bytes: int) -> Work:
    """hf_config: config.json. number_bytes: of a weight that is not quantised, and of a number in
    the KV cache. ModelError where the architecture is not supported."""
    model = build_model(hf_config)  # without storage
    listed = _Listed(model.attention_shape)
    model.compute_logits(listed, model.forward(listed))
    return Work(
        products=tuple(listed.products_by_rows()),
        attention=tuple(listed.attention),
        weight_bytes=WEIGHT_BYTES.get(quantization, number_bytes),
        kv_bytes=number_bytes,
    )


class _Listed(Ops[None]):
    """Values are of no interest here."""

    def __init__(self, shape: AttentionShape) -> None:
        self.products: list[Product] = []
        self.attention: list[tuple[int, int]] = []
        self._sampled_from = 0
        self._widths = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim

    def embed(self, tokens: Embedding, positions: Embedding | None = None) -> None:
        pass

    def norm(self, norm: LayerNorm | RMSNorm, x: None) -> None:
        pass

    def linear(self, proj: Linear, x: None) -> None:
        self._add(proj)

    def linear_gelu(self, proj: Linear, x: None) -> None:
        self._add(proj)

    def linear_swiglu(self, proj: Linear, x: None) -> None:
        self._add(proj)

    def linear_add(self, residual: None, proj: Linear, x: None) -> None:
        self._add(proj)

    def attend(
        self, layer: int, qkv: None, rope: Rope | None, norms: HeadNorms | None = None
    ) -> None:
        self.attention.append(self._widths)
        self._sampled_from = len(self.products)

    def logits(self, head: Linear | Embedding, x: None) -> None:
        self._add(head, head=True)

    def products_by_rows(self) -> Iterator[Product]:
        """Those after the last attention are of the rows that sample."""
        for number, product in enumerate(self.products):
            yield replace(product, sampled=number >= self._sampled_from)

    def _add(self, layer: Linear | Embedding, head: bool = False) -> None:
        outputs, inputs = layer.weight.shape
        self.products.append(Product(inputs, outputs, head=head))
