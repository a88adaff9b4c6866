"""Adapters with random numbers, for tests of the engines that compute them."""

from collections.abc import Callable

import torch
from torch import Tensor

from worker_proc.adapters.change import Adapter, LinearChange, Part
from worker_proc.models.base import StoredRows
from worker_proc.models.decoder import Decoder
from worker_proc.models.layers import Experts, Linear

EMBEDDING_CHANGE = 0.05


def random_adapter(
    model: Decoder,
    rank: int,
    seed: int,
    wanted: Callable[[str], bool] = lambda _: True,
    gain: bool = False,
    shift: bool = False,
    head: bool = False,
    embedding: bool = False,
    experts: bool = False,
) -> Adapter:
    """Change the projections of a model, each part of a fused one by a product of its own.

    Args:
        model: the model, with its weights.
        rank: of each product.
        seed: of the numbers.
        wanted: whether a matrix of the checkpoint is changed, by its name.
        gain: multiply the results, as DoRA does.
        shift: add to the results.
        head: change the whole head.
        embedding: change the table of embeddings.
        experts: change their matrices, too.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*size: int, scale: float = 1.0) -> Tensor:
        return torch.randn(*size, generator=generator) * scale

    matrices, changes = model.matrices(), dict[int, LinearChange]()
    of_experts = {
        linear
        for layer in model.modules()
        if isinstance(layer, Experts)
        for linear in (*layer.gate_up, *layer.down)
    }
    by_matrix: dict[int, list[StoredRows]] = {}
    for name, rows in model.checkpoint_rows().items():
        is_linear = isinstance(rows.matrix, Linear) and (experts or rows.matrix not in of_experts)
        if is_linear and wanted(name) and not (head and rows.matrix is model.lm_head):
            by_matrix.setdefault(matrices.index(rows.matrix), []).append(rows)
    for number, parts in by_matrix.items():
        outputs, inputs = matrices[number].weight.shape
        made = tuple(
            Part(part.first, normal(part.count, rank, scale=rank**-0.5), i * rank)
            for i, part in enumerate(parts)
        )
        down = normal(len(parts) * rank, inputs, scale=0.5 * inputs**-0.5)
        changes[number] = LinearChange(
            down,
            made,
            1 + normal(outputs, scale=0.1) if gain else None,
            normal(outputs, scale=0.1) if shift else None,
        )
    if head:
        matrix = model.lm_head or model.embedding
        up = normal(*matrix.weight.shape, scale=0.3 * matrix.weight.shape[1] ** -0.5)
        changes[matrices.index(matrix)] = LinearChange(None, (Part(0, up),))
    size = model.embedding.weight.shape
    table = normal(*size, scale=EMBEDDING_CHANGE) if embedding else None
    return Adapter(changes, table)
