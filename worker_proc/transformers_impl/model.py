"""A causal language model of transformers as the engine needs it."""

from typing import Any

import torch
from torch import Tensor, nn

from quadriga.errors import ModelError
from quadriga.windows import common_window
from worker_proc.attention.base import AttentionShape
from worker_proc.transformers_impl.attention_call import AttentionFunction, CallHandler
from worker_proc.transformers_impl.masks import recognized_masks
from worker_proc.transformers_impl.probe import (
    FIRST_PASS,
    SECOND_PASS,
    AttentionRecorder,
    LayerAttention,
    attention_shape,
    probe_layers,
)


class TransformersModel:
    """A model that computes hidden states and logits of the concatenated tokens of a step.

    The base model computes hidden states. What follows it (the head, and on some models a norm,
    a factor or a softcap) is run by the whole model, whose base model then returns the given
    hidden states.

    Attributes:
        layers: How each layer attends, in the order of the calls.
        attention_shape: The heads of all layers.
        vocab_size: Number of columns of the logits.
    """

    attention_shape: AttentionShape
    vocab_size: int

    def __init__(self, causal_lm: Any, function: AttentionFunction, context_length: int) -> None:
        """Probe a model that attends by `function`.

        Raises:
            ModelError: Attention over pages would not compute the same.
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
            handle: Computes the attention of each layer.
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
