"""Measure which inputs of each matrix are large, so that rounding keeps their weights precise.

A few of a model's inputs are hundreds of times as large as the others, and so are the errors of the
weights that multiply them.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from quadriga.wire.messages.arrays import pack_ids
from quadriga.wire.messages.worker import EXTEND, NewSlot, StepPlan
from worker_proc.attention.torch_reference import TorchAttention
from worker_proc.models.base import Model
from worker_proc.models.layers import Embedding, Linear
from worker_proc.step.inputs import StepInputs, make_inputs
from worker_proc.step.slot_table import SlotTable
from worker_proc.system.generator import seeded_generator
from worker_proc.torch_engine import TorchOps

MAX_TOKENS = 256
PAGE_SIZE = 16
SEED = 0

Squares = dict[Linear | Embedding, Tensor]


@torch.inference_mode()
def measure_inputs(model: Model, context_length: int) -> None:
    """Set the `importance` of each layer: the sum of each input's squares over random tokens.

    Args:
        model: A model on the CPU, with its weights.
        context_length: Its tokens at most.
    """
    dtype = next(model.parameters()).dtype
    num_tokens = min(MAX_TOKENS, context_length)
    num_pages = -(-num_tokens // PAGE_SIZE)
    cpu = torch.device("cpu")
    table = SlotTable(1, num_tokens, num_pages, PAGE_SIZE, cpu)
    attention = TorchAttention(model.attention_shape, num_pages, PAGE_SIZE, dtype, cpu)
    ops = _MeasuringOps(_random_step(model.vocab_size, num_tokens, num_pages, table), attention)
    model.compute_logits(ops, model.forward(ops))
    for layer, squares in ops.squares.items():
        layer.importance = squares


class _MeasuringOps(TorchOps):
    """Computes as plain torch does, and adds up the squares of all inputs of each matrix.

    Products are in float32, which every CPU multiplies fast.
    """

    def __init__(self, inputs: StepInputs, attention: TorchAttention) -> None:
        super().__init__({}, inputs, attention)
        self.squares: Squares = {}

    def logits(
        self,
        head: Linear | Embedding,
        x: Tensor,
        scale: float = 1.0,  # noqa: ARG002
        softcap: float | None = None,  # noqa: ARG002
    ) -> Tensor:
        """Measure the head's inputs only: its outputs are not needed."""
        self._measure(head, x)
        return x

    def _project(self, weights: Linear | Embedding, bias: Tensor | None, x: Tensor) -> Tensor:
        self._measure(weights, x)
        wide_bias = None if bias is None else bias.float()
        return F.linear(x.float(), weights.weight.float(), wide_bias).to(x.dtype)

    def _measure(self, layer: Linear | Embedding, x: Tensor) -> None:
        squares = x.float().square().sum(0)
        self.squares[layer] = squares + self.squares.get(layer, 0)


def _random_step(vocab_size: int, num_tokens: int, num_pages: int, table: SlotTable) -> StepInputs:
    """Return the prompt step of a slot with tokens that are the same each time."""
    generator = seeded_generator(SEED)
    tokens = torch.randint(vocab_size, (num_tokens,), generator=generator).tolist()
    slot = NewSlot(0, pack_ids(tokens), 0, pack_ids(range(num_pages)), 0.0, -1, 1.0, 0)
    table.admit([slot])
    return make_inputs(StepPlan(1, EXTEND, pack_ids([0]), pack_ids([num_tokens]), [], b""), table)
