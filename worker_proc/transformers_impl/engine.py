"""The engine of a model of transformers: its attention goes over KV pages in plain torch."""

import torch
import torch.nn.functional as F
from torch import Tensor

from quadriga.errors import ModelError
from worker_proc.attention.torch_reference import TorchAttention, TorchStepAttention
from worker_proc.step.engine_base import Engine
from worker_proc.step.inputs import StepInputs
from worker_proc.transformers_impl.attention_call import AttentionCall
from worker_proc.transformers_impl.model import TransformersModel
from worker_proc.transformers_impl.probe import LayerAttention


class TransformersEngine(Engine):
    """A model of transformers whose layers attend over pages."""

    name = "transformers"

    def __init__(self, model: TransformersModel, attention: TorchAttention) -> None:
        if any(x.window or x.softcap or x.sinks is not None for x in model.layers):
            raise ModelError(
                "the model has attention with a window, a soft cap or sinks, which is not supported"
            )
        self.model = model
        self._attention = attention

    def forward(self, inputs: StepInputs) -> Tensor:
        step = StepAttention(
            self._attention.begin_step(inputs.layout),
            self.model.layers,
            self._attention.shape.head_dim,
        )
        return self.model.hidden_states(inputs.token_ids, inputs.positions, step)

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
        """Write keys and values to the pages, and return `[tokens, heads, value_dim]`."""
        layer, self._layer = self._layer, self._layer + 1
        how = self._layers[layer]
        factor = how.scale * self._head_dim**0.5
        query, key, value = map(self._pad, (call.query * factor, call.key, call.value))
        out = self._step.attend(layer, query, torch.stack((key, value), 1))
        return out.view(len(out), how.heads, self._head_dim)[..., : how.value_dim]

    def _pad(self, heads: Tensor) -> Tensor:
        """Fill `[tokens, heads, dim]` up to the size of a head in the pages with zeros."""
        missing = self._head_dim - heads.shape[-1]
        return F.pad(heads, (0, missing)) if missing else heads
