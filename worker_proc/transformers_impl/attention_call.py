"""The attention function by which models of transformers attend over KV pages.

Models look up their attention in transformers' AttentionInterface, by the name in their config
(https://huggingface.co/docs/transformers/attention_interface). Each model gets a name of its own.
"""

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

_numbers = itertools.count()


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """One call of the attention function, which a model makes once for each layer.

    Attributes:
        module: The attention module of the layer.
        query: `[tokens, heads, head_dim]`, rotated.
        key: `[tokens, kv_heads, head_dim]`, rotated.
        value: `[tokens, kv_heads, value_dim]`.
        mask: What the model's mask function returned for the layer.
        scaling: Factor of the scores; None: head_dim ** -0.5.
        options: The other keyword arguments.
    """

    module: nn.Module
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Any
    scaling: float | None
    options: dict[str, Any]


# Takes a call and returns `[tokens, heads, value_dim]`.
CallHandler = Callable[[AttentionCall], Tensor]


class AttentionFunction:
    """An attention function that is registered with transformers.

    Attributes:
        name: The value of `attn_implementation` that selects it.
    """

    def __init__(self) -> None:
        from transformers import AttentionInterface

        self.name = f"quadriga_{next(_numbers)}"
        self._handle: CallHandler | None = None
        AttentionInterface.register(self.name, self._attend)

    @contextmanager
    def handled_by(self, handle: CallHandler) -> Iterator[None]:
        """Let `handle` compute the calls of one forward pass."""
        self._handle = handle
        try:
            yield
        finally:
            self._handle = None

    def _attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any,
        scaling: float | None = None,
        **options: Any,
    ) -> tuple[Tensor, None]:
        """Attend: the signature is that of transformers' attention functions.

        Args:
            module: The attention module of the layer.
            query: `[1, heads, tokens, head_dim]`.
            key: `[1, kv_heads, tokens, head_dim]`.
            value: `[1, kv_heads, tokens, value_dim]`.
            attention_mask: What the model's mask function returned.
            scaling: Factor of the scores.
            options: Further arguments, which depend on the model.

        Returns:
            `[1, tokens, heads, value_dim]`, and None in place of the weights.
        """
        assert self._handle is not None
        query, key, value = (part[0].transpose(0, 1) for part in (query, key, value))
        call = AttentionCall(module, query, key, value, attention_mask, scaling, options)
        return self._handle(call).unsqueeze(0), None


def repeat_kv(values: Tensor, heads: int) -> Tensor:
    """Repeat `[tokens, kv_heads, dim]` for query heads that share them: `[tokens, heads, dim]`."""
    return torch.repeat_interleave(values, heads // values.shape[1], dim=1)
