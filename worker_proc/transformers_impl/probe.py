"""Find out how a model of transformers attends, and refuse one that pages cannot serve.

Two forward passes of three tokens are enough. Their attention is replaced by one that returns each
token's own value, so that nothing may flow between tokens. The second pass has two of the tokens in
another order, beside another one: where their queries, keys, values or hidden states change, the
model mixes tokens outside of attention (a recurrence, a convolution), or does not use the given
positions.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quadriga.errors import ModelError
from worker_proc.attention.base import AttentionShape
from worker_proc.models.layers import Attention
from worker_proc.transformers_impl.attention_call import AttentionCall, CallHandler, repeat_kv
from worker_proc.transformers_impl.masks import RecognizedMask

# Token ids and positions of the two passes; tokens 2 and 3 occur in both.
FIRST_PASS = ([1, 2, 3], [0, 1, 2])
SECOND_PASS = ([2, 3, 4], [1, 2, 0])
# Relative to the largest value; a mixed or misplaced token differs by far more.
TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 2e-2}
# Options of the attention function that pages need not know.
HARMLESS_OPTIONS = frozenset(
    (
        "cache_position", "deterministic", "dropout", "is_causal", "logits_to_keep",
        "output_attentions", "output_hidden_states", "output_router_logits", "past_key_values",
        "position_embeddings", "position_ids", "return_dict", "s_aux", "sliding_window", "softcap",
        "use_cache",
    )
)  # fmt: skip

# Runs the model with this attention and returns hidden states `[tokens, hidden]`.
ForwardPass = Callable[[CallHandler], Tensor]


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """How one layer attends.

    Attributes:
        heads, kv_heads: Number of query heads, and of key and value heads.
        head_dim: Size of a query and of a key.
        value_dim: Size of a value.
        rules: Scale, window, soft cap and sinks.
    """

    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    rules: Attention


class AttentionRecorder:
    """Records the calls of one forward pass, in which each token attends to itself only."""

    def __init__(self) -> None:
        self.calls: list[AttentionCall] = []

    def __call__(self, call: AttentionCall) -> Tensor:
        """Record a call and return its values `[tokens, heads, value_dim]`."""
        self.calls.append(call)
        return repeat_kv(call.value, call.query.shape[1])


def probe_layers(first_pass: ForwardPass, second_pass: ForwardPass) -> tuple[LayerAttention, ...]:
    """Return how each layer attends.

    Args:
        first_pass: Runs the model on FIRST_PASS, with masks that are recognized.
        second_pass: Runs the model on SECOND_PASS, as it will run on the tokens of a step.

    Raises:
        ModelError: Attention over pages would not compute the same.
    """
    first, second = AttentionRecorder(), AttentionRecorder()
    try:
        hidden, other_hidden = first_pass(first), second_pass(second)
    except Exception as error:  # whatever the model's code raises ends the start
        reason = " ".join(str(error).split())
        raise ModelError(
            f"a forward pass without masks and cache fails: {type(error).__name__}: {reason}"
        ) from error
    if not first.calls:
        raise ModelError("no layer calls the attention function")
    layers = tuple(_layer(call) for call in first.calls)
    if len(first.calls) != len(second.calls):
        raise ModelError("the number of layers depends on the tokens")
    for number, (one, other) in enumerate(zip(first.calls, second.calls, strict=True)):
        if other.mask is not None:
            raise ModelError(f"layer {number} makes an attention mask of its own")
        for name in ("query", "key", "value"):
            _check_agree(getattr(one, name), getattr(other, name), f"{name} of layer {number}")
    _check_agree(hidden, other_hidden, "hidden state")
    return layers


def attention_shape(layers: tuple[LayerAttention, ...]) -> AttentionShape:
    """Return the heads of all layers, each as large as the largest one.

    Raises:
        ModelError: The layers have different numbers of heads.
    """
    counts = sorted({(layer.heads, layer.kv_heads) for layer in layers})
    if len(counts) > 1:
        shown = ", ".join(f"{heads} and {kv_heads}" for heads, kv_heads in counts)
        raise ModelError(f"the layers have different numbers of query and key heads: {shown}")
    heads, kv_heads = counts[0]
    head_dim = max(max(layer.head_dim, layer.value_dim) for layer in layers)
    return AttentionShape(len(layers), heads, kv_heads, head_dim)


def check_options(options: dict[str, Any]) -> None:
    """Raise ModelError if the attention function gets options that change what it computes."""
    unknown = sorted(
        name for name in options.keys() - HARMLESS_OPTIONS if options[name] is not None
    )
    if unknown:
        raise ModelError(f"its attention needs {', '.join(unknown)}, which pages do not have")


def _layer(call: AttentionCall) -> LayerAttention:
    num_tokens = len(FIRST_PASS[0])
    if any(len(part) != num_tokens for part in (call.query, call.key, call.value)):
        raise ModelError("its attention has other tokens than those of the text")
    check_options(call.options)
    options = call.options
    if options.get("is_causal") is False or not getattr(call.module, "is_causal", True):
        raise ModelError("its attention is not causal")
    head_dim = call.query.shape[2]
    return LayerAttention(
        heads=call.query.shape[1],
        kv_heads=call.key.shape[1],
        head_dim=head_dim,
        value_dim=call.value.shape[2],
        rules=Attention(
            head_dim**-0.5 if call.scaling is None else float(call.scaling),
            softcap=options.get("softcap"),
            window=_window(call),
            sinks=options.get("s_aux"),
        ),
    )


def _window(call: AttentionCall) -> int | None:
    """Return the window of the mask, which decides; without a mask that of the options."""
    if isinstance(call.mask, RecognizedMask):
        if not call.mask.is_known:
            raise ModelError("its attention mask is neither causal nor a sliding window")
        return call.mask.window
    if call.mask is not None:
        raise ModelError("it makes an attention mask of its own")
    window: int | None = call.options.get("sliding_window")
    return window


def _check_agree(first: Tensor, second: Tensor, what: str) -> None:
    """Check the tokens that occur in both passes: the last two of the first one come first."""
    tolerance = TOLERANCES.get(first.dtype, 1e-3)
    one, other = first[1:].float(), second[:2].float()
    largest = max(1e-6, float(one.abs().nan_to_num().max()))
    if not torch.allclose(one, other, rtol=0.0, atol=tolerance * largest, equal_nan=True):
        raise ModelError(
            f"the {what} depends on other tokens, or on their order: something besides attention"
            " mixes tokens, or positions are not taken"
        )
