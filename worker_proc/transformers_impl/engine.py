"""The engine of a model of transformers: its attention goes over KV pages in plain torch."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from quadriga.errors import ModelError
from worker_proc.attention.torch_reference import TorchAttention, TorchStepAttention
from worker_proc.step.engine_base import Engine
from worker_proc.step.inputs import StepInputs
from worker_proc.transformers_impl.attention_call import AttentionCall
from worker_proc.transformers_impl.model import TransformersModel
from worker_proc.transformers_impl.probe import LayerAttention, check_options


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

    def logits(self, hidden: Tensor) -> Tensor:
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
            ModelError: The call has a mask or options that the probed ones did not have.
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
