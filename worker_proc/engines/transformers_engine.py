"""The engine of a model of transformers: its attention goes over KV pages in plain torch.

The attention function that the model calls; the masks that it asks for, recognized; the probe of
how each layer attends; the model, and the engine.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quadriga.errors import ModelError
from quadriga.server.models.families.windows import common_window
from worker_proc.engines.torch_engine import TorchAttention, TorchStepAttention
from worker_proc.models.attention import AttentionShape, Ints
from worker_proc.models.layers import Attention
from worker_proc.step.engine import Engine
from worker_proc.step.inputs import StepInputs

# The attention function by which models of transformers attend over KV pages.
#
# Models look up their attention in transformers' AttentionInterface, by the name in their config
# (https://huggingface.co/docs/transformers/attention_interface). Each model gets a name of its
# own.

_numbers = itertools.count()


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """One call of the attention function, which a model makes once for each layer.

    Attributes:
        module: the attention module of the layer.
        query: `[tokens, heads, head_dim]`, rotated.
        key: `[tokens, kv_heads, head_dim]`, rotated.
        value: `[tokens, kv_heads, value_dim]`.
        mask: what the model's mask function returned for the layer.
        scaling: factor of the scores; None: head_dim ** -0.5.
        options: the other keyword arguments.
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
        name: the value of `attn_implementation` that selects it.
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
            module: the attention module of the layer.
            query: `[1, heads, tokens, head_dim]`.
            key: `[1, kv_heads, tokens, head_dim]`.
            value: `[1, kv_heads, tokens, value_dim]`.
            attention_mask: what the model's mask function returned.
            scaling: factor of the scores.
            options: further arguments, which depend on the model.

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


# Recognize the mask that a model of transformers asks for: causal, or causal with a window.
#
# transformers describes a mask as a function of indices (`masking_utils.py`). While a model is
# probed, a registered mask function evaluates that description and passes its result to the
# layers, in place of a mask.

# Compares rows of this many queries with the window that the last query shows.
NUM_CHECKED_QUERIES = 64

# Returns whether a query sees a key, for the indexes (batch, head, query, key).
MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class RecognizedMask:
    """Stands for an attention mask while a model is probed.

    Attributes:
        window: number of last tokens that a token sees, itself included; None: all.
        is_known: whether the mask is causal with that window.
    """

    window: int | None
    is_known: bool = True


def recognize_mask(sees: MaskFunction, context_length: int) -> RecognizedMask:
    """Return what a mask is for sequences of `context_length` tokens.

    Args:
        sees: the description of the mask.
        context_length: tokens of the longest sequence; a window that is not shorter has no effect.
    """
    last = context_length - 1
    seen = _row(sees, last, context_length)
    window = int(seen.sum())
    step = max(1, context_length // NUM_CHECKED_QUERIES)
    queries = {last - 1, window - 1, window, *range(0, context_length, step)}
    keys = torch.arange(context_length)
    for query in sorted(query for query in queries if 0 <= query < context_length):
        expected = (keys <= query) & (keys > query - window)
        if not torch.equal(_row(sees, query, context_length), expected):
            return RecognizedMask(None, is_known=False)
    return RecognizedMask(None if window == context_length else window)


def _row(sees: MaskFunction, query: int, num_keys: int) -> Tensor:
    """Return `[num_keys]` which keys a query sees."""
    keys = torch.arange(num_keys)
    zeros = torch.zeros_like(keys)
    return torch.as_tensor(sees(zeros, zeros, zeros + query, keys)).expand(num_keys)


@contextmanager
def recognized_masks(name: str, context_length: int) -> Iterator[None]:
    """Let models with the attention implementation `name` pass RecognizedMask to their layers.

    Otherwise transformers makes no masks for it, as no mask function of this name is registered.
    """
    from transformers import AttentionMaskInterface

    def make_mask(*_: Any, mask_function: MaskFunction, **__: Any) -> RecognizedMask:
        return recognize_mask(mask_function, context_length)

    AttentionMaskInterface.register(name, make_mask)
    try:
        yield
    finally:
        del AttentionMaskInterface._global_mapping[name]


# Find out how a model of transformers attends, and refuse one that pages cannot serve.
#
# Two forward passes of three tokens are enough. Their attention is replaced by one that returns
# each token's own value, so that nothing may flow between tokens. The second pass has two of the
# tokens in another order, beside another one: where their queries, keys, values or hidden states
# change, the model mixes tokens outside of attention (a recurrence, a convolution), or does not
# use the given positions.

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
        heads, kv_heads: number of query heads, and of key and value heads.
        head_dim: size of a query and of a key.
        value_dim: size of a value.
        rules: scale, window, soft cap and sinks.
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
        first_pass: runs the model on FIRST_PASS, with masks that are recognized.
        second_pass: runs the model on SECOND_PASS, as it will run on the tokens of a step.

    Raises:
        ModelError: attention over pages would not compute the same.
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
        ModelError: the layers have different numbers of heads.
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


class TransformersModel:
    """A model that computes hidden states and logits of the concatenated tokens of a step.

    The base model computes hidden states. What follows it (the head, and on some models a norm,
    a factor or a softcap) is run by the whole model, whose base model then returns the given
    hidden states.

    Attributes:
        layers: how each layer attends, in the order of the calls.
        attention_shape: the heads of all layers.
        vocab_size: number of columns of the logits.
    """

    attention_shape: AttentionShape
    vocab_size: int

    def __init__(self, causal_lm: Any, function: AttentionFunction, context_length: int) -> None:
        """Probe a model that attends by `function`.

        Raises:
            ModelError: attention over pages would not compute the same.
        """
        base = causal_lm.base_model
        if base is causal_lm:
            base = getattr(causal_lm, "model", None)
        if base is None:
            raise ModelError(f"{type(causal_lm).__name__} has no base model without a head")
        self._causal_lm = causal_lm
        self._function = function
        self._device: torch.device = causal_lm.get_input_embeddings().weight.device
        self._base_forward = base.forward
        self._given_hidden = torch.empty(0)
        base.forward = self._return_hidden
        with torch.inference_mode():
            self._probe(context_length)

    @property
    def window(self) -> int:
        """Number of last tokens that every layer is limited to; 0 if a layer sees all."""
        return common_window(layer.rules.window for layer in self.layers)

    def parameters(self) -> list[nn.Parameter]:
        """Return the weights."""
        return list(self._causal_lm.parameters())

    def hidden_states(self, token_ids: Tensor, positions: Tensor, handle: CallHandler) -> Tensor:
        """Compute the hidden states `[tokens, hidden]` of tokens.

        Args:
            token_ids: `[tokens]`.
            positions: `[tokens]`, each in the token's own request.
            handle: computes the attention of each layer.
        """
        with self._function.handled_by(handle):
            output = self._base_forward(
                input_ids=token_ids.long().unsqueeze(0),
                position_ids=positions.unsqueeze(0),
                use_cache=False,
            )
        hidden: Tensor = output.last_hidden_state[0]
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Compute the logits `[rows, vocab_size]` of hidden states `[rows, hidden]`."""
        self._given_hidden = hidden.unsqueeze(0)
        logits: Tensor = self._causal_lm(inputs_embeds=self._given_hidden, use_cache=False).logits
        return logits[0]

    def _return_hidden(self, *_: Any, **__: Any) -> "_HiddenStates":
        """Stand for the forward pass of the base model."""
        return _HiddenStates(self._given_hidden)

    def _probe(self, context_length: int) -> None:
        def run(tokens: list[int], positions: list[int], handle: CallHandler) -> Tensor:
            ids = torch.tensor(tokens, device=self._device)
            return self.hidden_states(ids, torch.tensor(positions, device=self._device), handle)

        def first_pass(handle: CallHandler) -> Tensor:
            with recognized_masks(self._function.name, context_length):
                return run(*FIRST_PASS, handle)

        self.layers: tuple[LayerAttention, ...] = probe_layers(
            first_pass, lambda handle: run(*SECOND_PASS, handle)
        )
        self.attention_shape = attention_shape(self.layers)
        hidden = run(*FIRST_PASS, AttentionRecorder())
        self.vocab_size = self.logits(hidden).shape[-1]


class _HiddenStates:
    """The output of a base model, whose further fields are None."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)

    def __getitem__(self, index: int | slice) -> Any:
        return (self.last_hidden_state,)[index]


class TransformersEngine(Engine):
    """A model of transformers whose layers attend over pages."""

    name = "transformers"

    def __init__(self, model: TransformersModel, attention: TorchAttention) -> None:
        self.model = model
        self._attention = attention

    def forward(self, inputs: StepInputs) -> Tensor:
        attention = self._attention.begin_step(inputs.layout)
        step = StepAttention(attention, self.model.layers, self._attention.shape.head_dim)
        hidden = self.model.hidden_states(inputs.token_ids, inputs.positions, step)
        attention.note_nonfinite(inputs)
        return hidden

    def kv_parts(self) -> Sequence[Tensor]:
        return self._attention.layers

    def logits(self, hidden: Tensor, adapters: Ints | None = None) -> Tensor:  # noqa: ARG002
        return self.model.logits(hidden)


class StepAttention:
    """Computes the calls of one step, the first of which is that of layer 0."""

    def __init__(
        self, step: TorchStepAttention, layers: tuple[LayerAttention, ...], head_dim: int
    ) -> None:
        self._step = step
        self._layers = layers
        self._head_dim = head_dim
        self._layer = 0

    def __call__(self, call: AttentionCall) -> Tensor:
        """Write keys and values to the pages, and return `[tokens, heads, value_dim]`.

        Raises:
            ModelError: the call has a mask or options that the probed ones did not have.
        """
        layer, self._layer = self._layer, self._layer + 1
        how = self._layers[layer]
        if call.mask is not None:
            raise ModelError(f"layer {layer} makes an attention mask of its own")
        check_options(call.options)
        query, key, value = map(self._pad, (call.query, call.key, call.value))
        out = self._step.attend(layer, query, torch.stack((key, value), 1), how.rules)
        return out.view(len(out), how.heads, self._head_dim)[..., : how.value_dim]

    def _pad(self, heads: Tensor) -> Tensor:
        """Fill `[tokens, heads, dim]` up to the size of a head in the pages with zeros."""
        missing = self._head_dim - heads.shape[-1]
        return F.pad(heads, (0, missing)) if missing else heads
