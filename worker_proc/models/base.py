"""The contract of a model architecture, and how stored tensors become its parameters.

First the parts into which the stacked, fused or transposed tensors of a checkpoint are cut, then
`Model`.
"""

import dataclasses
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn

from quadriga.errors import ModelError
from quadriga.server.models.families.decoder_config import DecoderConfig
from quadriga.server.models.families.windows import common_window
from worker_proc.models.attention import AttentionShape
from worker_proc.models.layers import (
    Attention,
    ClassifierHead,
    Embedding,
    LayerNorm,
    Linear,
    RMSNorm,
)
from worker_proc.models.ops import Ops, Value
from worker_proc.models.quantized_weights import CodedRows, PackedRows, StackedRows


def expert_parts(
    config: DecoderConfig, name: str, tensor: object
) -> Iterator[tuple[str, Tensor | CodedRows]] | None:
    """Return the names and tensors of each expert; None if the stored tensor is not stacked.

    Args:
        config: the model, whose `names` has "experts_gate_up" and "experts_down".
        name: the stored name.
        tensor: [experts, outputs, inputs], [experts, inputs, outputs] or a bias
            [experts, outputs], or their codes; or rows of one matrix, which are never stacked.
    """
    if not isinstance(tensor, Tensor | StackedRows):
        return None
    for key in ("experts_gate_up", "experts_down"):
        layer, found, end = name.partition(f".{config.names.get(key)}")
        if found and end in ("", ".weight", "_bias"):
            return _parts(config, layer, tensor, key, "bias" if end == "_bias" else "weight")
    return None


def _parts(
    config: DecoderConfig, layer: str, tensor: Tensor | StackedRows, key: str, kind: str
) -> Iterator[tuple[str, Tensor | CodedRows]]:
    names = ("expert_gate", "expert_up") if key == "experts_gate_up" else ("expert_down",)
    for number, parts in enumerate(_of_each_expert(config, tensor, len(names) == 2, kind)):
        expert = f"{layer}.{config.name('expert').format(number)}"
        for part, values in zip(names, parts, strict=True):
            yield f"{expert}.{config.name(part)}.{kind}", values


def _of_each_expert(
    config: DecoderConfig, tensor: Tensor | StackedRows, is_halved: bool, kind: str
) -> Iterator[tuple[Tensor | CodedRows, ...]]:
    """Yield the gate and up rows of each expert, or all rows of each."""
    experts = config.experts
    assert experts is not None
    if isinstance(tensor, StackedRows):
        yield from tensor.halves(experts.interleaved) if is_halved else zip(tensor, strict=True)
        return
    for rows in tensor:
        if experts.transposed and kind == "weight":
            rows = rows.t()
        if is_halved:
            yield (rows[::2], rows[1::2]) if experts.interleaved else rows.chunk(2)
        else:
            yield (rows,)


StoredTensor = Tensor | PackedRows | CodedRows
Stored = TypeVar("Stored", Tensor, PackedRows, CodedRows)


def checkpoint_parts(
    config: DecoderConfig, name: str, tensor: StoredTensor | StackedRows
) -> Iterator[tuple[str, StoredTensor]]:
    """Yield the parts of a stored tensor, whole over the ranks, by their names in `names`.

    Args:
        config: the model, whose `names` has "qkv" and "gate_up" if the checkpoint fuses them.
        name: the stored name.
        tensor: the stored tensor.
    """
    if name.startswith(config.skipped_starts):
        return
    name = plain_name(config, name)
    if name.endswith(config.skipped) or (
        config.tie_word_embeddings and name == f"{config.name('head')}.weight"
    ):
        return
    if (experts := expert_parts(config, name, tensor)) is not None:
        yield from experts
        return
    if isinstance(tensor, StackedRows):
        raise ModelError(f"{name} is in MXFP4, but it is no projection of experts")
    if config.transposed and name.startswith(f"{config.name('layers')}."):
        tensor = tensor.t() if isinstance(tensor, Tensor) and tensor.dim() == 2 else tensor
    matrix, _, kind = name.rpartition(".")
    names = part_names(config, matrix)
    if len(names) > 1:
        rows = _rows_of_qkv(config, tensor) if len(names) == 3 else _halves(tensor)
        for part, index in zip(names, rows, strict=True):
            yield f"{part}.{kind}", take_rows(tensor, index)
        return
    if config.interleaved_rope and any(f".{config.name(key)}." in name for key in ("q", "k")):
        tensor = take_rows(tensor, half_rotary_rows(config, tensor.shape[0] // config.head_dim))
    yield name, tensor


def part_names(config: DecoderConfig, name: str) -> tuple[str, ...]:
    """Return the names of the parts of a matrix that the checkpoint fuses; itself if it does not.

    Args:
        config: the model.
        name: of the matrix, without `.weight` and what `plain_name` removes.
    """
    for key, parts in (("qkv", ("q", "k", "v")), ("gate_up", ("gate", "up"))):
        fused = config.names.get(key)
        if fused is not None and name.endswith(f".{fused}"):
            start = name.removesuffix(fused)
            return tuple(f"{start}{config.name(part)}" for part in parts)
    return (name,)


def plain_name(config: DecoderConfig, name: str) -> str:
    """Return the name of a stored tensor without the parts that `config` removes."""
    for part in config.removed:
        name = name.replace(part, "")
    return name


def take_rows(tensor: StoredTensor, rows: Tensor) -> StoredTensor:
    """Return the rows of these numbers."""
    if isinstance(tensor, PackedRows):
        return dataclasses.replace(tensor, data=tensor.data[rows.to(tensor.data.device)])
    if isinstance(tensor, CodedRows):
        return tensor.take(rows)
    return tensor[rows.to(tensor.device)]


def half_rotary_rows(config: DecoderConfig, heads: int) -> Tensor:
    """Return the rows of queries or keys so that rotated pairs are half the rotated channels apart.

    The stored rows have the channels of a pair side by side.
    """
    scaling = next(rope for rope in config.ropes if rope is not None)
    # Of an odd number, the channel after the last one is rotated as well.
    dim, rotated = config.head_dim, scaling.head_dim + scaling.head_dim % 2
    head = torch.cat((torch.arange(rotated).view(-1, 2).t().flatten(), torch.arange(rotated, dim)))
    return (torch.arange(heads).unsqueeze(1) * dim + head).flatten()


def _rows_of_qkv(config: DecoderConfig, tensor: StoredTensor) -> tuple[Tensor, ...]:
    """Return the rows of queries, keys and values in a fused tensor."""
    rows = torch.arange(tensor.shape[0])
    if config.qkv_by_head:
        heads = rows.view(-1, 3, config.head_dim).transpose(0, 1).flatten(1)
        return heads[0], heads[1], heads[2]
    group = config.num_heads // config.num_kv_heads
    size = len(rows) // (group + 2)
    return rows[: group * size], rows[group * size : -size], rows[-size:]


def _halves(tensor: StoredTensor) -> tuple[Tensor, ...]:
    return torch.arange(tensor.shape[0]).chunk(2)


@dataclass(frozen=True, slots=True)
class StoredRows:
    """The rows of a matrix that one matrix of the checkpoint fills.

    Attributes:
        matrix: the layer with the weight, and with the bias if there is one.
        first: the first row.
        count: number of rows.
    """

    matrix: Linear | Embedding
    first: int
    count: int

    def tensors(self, name: str) -> dict[str, Tensor]:
        """Return the views of weight and bias by their names. name: without `.weight`."""
        rows = slice(self.first, self.first + self.count)
        bias = self.matrix.bias if isinstance(self.matrix, Linear) else None
        tensors: dict[str, Tensor] = {f"{name}.weight": self.matrix.weight[rows]}
        return tensors if bias is None else tensors | {f"{name}.bias": bias[rows]}


class Model(nn.Module):
    """A decoder over the concatenated tokens of a step, which may belong to many requests.

    The constructor allocates the weights; the loader fills the tensors of `checkpoint_tensors` and
    then calls `finish_loading`.

    Attributes:
        attention_shape: layers, heads and head size of this rank.
        vocab_size: number of columns of the logits.
        final_norm: of hidden states before the head; None: the last layer normalizes its output.
        has_head: it has logits, so that tokens can be sampled.
        classifier: the head that scores texts; None: there is none.
    """

    attention_shape: AttentionShape
    vocab_size: int
    final_norm: LayerNorm | RMSNorm | None
    has_head: bool = True
    classifier: ClassifierHead | None

    @property
    def window(self) -> int:
        """Tokens that every layer's attention is limited to; 0 if a layer sees all.

        A bidirectional model reads a text in one step, in which no page is given back.
        """
        if self.attention_shape.bidirectional:
            return 0
        return common_window(m.window for m in self.modules() if isinstance(m, Attention))

    @abstractmethod
    def forward(self, ops: Ops[Value]) -> Value:
        """Return the hidden states [tokens, hidden_size] of the step's tokens."""

    @abstractmethod
    def compute_logits(self, ops: Ops[Value], hidden: Value) -> Value:
        """Return the logits [rows, vocab_size] of hidden states [rows, hidden_size]."""

    def matrices(self) -> list[Linear | Embedding]:
        """Return the matrices in the order by which adapters number them."""
        return [layer for layer in self.modules() if isinstance(layer, Linear | Embedding)]

    @abstractmethod
    def checkpoint_rows(self) -> dict[str, StoredRows]:
        """Return what each matrix of the checkpoint fills, by its name without `.weight`."""

    @abstractmethod
    def checkpoint_tensors(self) -> dict[str, Tensor]:
        """Return the view of a parameter that each tensor of the checkpoint fills, by its name.

        A view can be a row range of a fused weight, as `checkpoint_rows` says.
        """

    def checkpoint_parts(
        self, name: str, tensor: StoredTensor | StackedRows
    ) -> Iterator[tuple[str, StoredTensor]]:
        """Yield the parts of a stored tensor by the names of `checkpoint_tensors`.

        A tensor that the model does not need has no parts.
        """
        assert not isinstance(tensor, StackedRows)  # which only a Decoder has
        yield name, tensor

    def finish_loading(self, context_length: int) -> None:
        """Compute the constants that no checkpoint has, for positions below `context_length`."""
