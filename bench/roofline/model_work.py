"""List what a model multiplies and reads, by running its own code on a recorder."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from bench.roofline.roofline_model import Product, Work
from worker_proc.models import decoder, ops
from worker_proc.models.attention import AttentionShape
from worker_proc.models.layers import (
    Activation,
    Attention,
    Embedding,
    Experts,
    LayerNorm,
    Linear,
    RMSNorm,
)

NUMBER_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
# Bytes of a quantized weight, with its share of the scales of a group of 32.
WEIGHT_BYTES = {"int8": 1 + 2 / 32, "int4": 0.5 + 4 / 32}


def work_of(hf_config: dict[str, Any], quantization: str, number_bytes: int) -> Work:
    """Return the work of a model with this config.json, or raise ModelError.

    `number_bytes` is the size of a weight that is not quantized, and of a number in the KV cache.
    """
    model = decoder.build_model(hf_config)  # without storage
    recorder = _WorkRecorder(model.attention_shape)
    model.compute_logits(recorder, model.forward(recorder))
    return Work(
        products=tuple(recorder.products_by_rows()),
        attention=tuple(recorder.attention),
        weight_bytes=WEIGHT_BYTES.get(quantization, number_bytes),
        kv_bytes=number_bytes,
    )


class _WorkRecorder(ops.Ops[None]):
    """Records products and attention; values are None."""

    def __init__(self, shape: AttentionShape) -> None:
        self.products: list[Product] = []
        self.attention: list[tuple[int, int]] = []
        self._sampled_from = 0
        self._widths = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim

    def embed(
        self,
        tokens: Embedding,
        positions: Embedding | None = None,
        scale: float = 1.0,
        second_type: object = None,
    ) -> None:
        pass

    def norm(self, norm: LayerNorm | RMSNorm, x: None) -> None:
        pass

    def norm_residual(self, norm: LayerNorm | RMSNorm, residual: None) -> None:
        pass

    def norm_add(self, residual: None, norm: RMSNorm, x: None) -> None:
        pass

    def linear(self, proj: Linear, x: None) -> None:
        self._add(proj)

    def linear_activation(self, proj: Linear, x: None, activation: Activation) -> None:
        self._add(proj)

    def linear_gated(self, proj: Linear, x: None, activation: Activation) -> None:
        self._add(proj)

    def linear_add(self, residual: None, proj: Linear, x: None, scale: float = 1.0) -> None:
        self._add(proj)

    def experts_add(self, residual: None, experts: Experts, x: None, scale: float = 1.0) -> None:
        self._add(experts.router)
        for layers in (experts.gate_up, experts.down):
            layer = layers[0]
            assert isinstance(layer, Linear)
            self._add(layer, num_experts=len(layers), num_chosen=experts.num_chosen)

    def attend(self, layer: int, qkv: None, attention: Attention) -> None:
        self.attention.append(self._widths)
        self._sampled_from = len(self.products)

    def logits(
        self, head: Linear | Embedding, x: None, scale: float = 1.0, softcap: float | None = None
    ) -> None:
        self._add(head, head=True)

    def products_by_rows(self) -> Iterator[Product]:
        """Yield the products; those after the last attention have only the rows that sample."""
        for number, product in enumerate(self.products):
            yield replace(product, sampled=number >= self._sampled_from)

    def _add(
        self,
        layer: Linear | Embedding,
        head: bool = False,
        num_experts: int = 1,
        num_chosen: int = 1,
    ) -> None:
        outputs, inputs = layer.weight.shape
        product = Product(
            inputs, outputs, head=head, num_experts=num_experts, num_chosen=num_chosen
        )
        self.products.append(product)
