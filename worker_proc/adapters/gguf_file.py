"""Read an adapter in a GGUF, as llama.cpp's convert_lora_to_gguf writes it.

A tensor's name is that of the base's tensor with .lora_a [rank, inputs] or .lora_b [outputs, rank]
behind it; those of the embedding are [entries, rank] and [channels, rank]. Source: llama.cpp,
`src/llama-adapter.cpp` and `src/llama-graph.cpp`.
"""

import math
from collections import defaultdict
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quadriga.errors import ModelError
from quadriga.server.models.adapters.content import AdapterContent, check_rank
from quadriga.server.models.formats.quantization import BLOCK_SIZES
from worker_proc.adapters.change import Adapter
from worker_proc.adapters.peft_files import check_finite
from worker_proc.adapters.places import Assembly, Places
from worker_proc.loading.checkpoints import (
    GGUF_FAMILIES,
    deinterleave_heads,
    dequantize_rows,
    hf_name,
)
from worker_proc.loading.loader import shown_names
from worker_proc.models.quantized_weights import PackedRows

DOWN, UP = ".lora_a", ".lora_b"
ALPHA = "adapter.lora.alpha"
# Names of an architecture in a GGUF that differ from `model_type`.
_ARCHITECTURES = {"mistral": "llama", "gemma3_text": "gemma3"}


def read_gguf(
    content: AdapterContent, places: Places, config: dict[str, Any], max_rank: int | None
) -> Adapter:
    """Return an adapter in a GGUF for a model.

    Args:
        content: of a GGUF of the type adapter.
        places: of the model.
        config: the model's config.json.
        max_rank: the largest rank that is served; None: there is no limit.

    Raises:
        ModelError: the adapter is broken, or does not fit the model; the message has to be put
            behind its path.
    """
    assembly, unknown = Assembly(places), []
    config = config | {"model_type": _family(content, config)}
    pairs, others = _pairs(content)
    for name, pair in pairs.items():
        if DOWN not in pair or UP not in pair:
            raise ModelError(f"{name} lacks one of {DOWN} and {UP}; convert the adapter again")
        if not _add(assembly, places, config, name, content, pair, max_rank):
            unknown.append(name)
    if unknown or others:
        raise ModelError(
            f"it has {len(unknown) + len(others)} tensors that match nothing that can be changed"
            f" here: {shown_names(unknown + others)}"
        )
    return assembly.finish()


def _family(content: AdapterContent, config: dict[str, Any]) -> str:
    """Return the family by whose names the tensors are named."""
    assert content.header is not None
    found, family = content.header.metadata.get("general.architecture"), str(config["model_type"])
    expected = _ARCHITECTURES.get(family, family)
    family = "gemma3" if family == "gemma3_text" else family
    if found != expected or family not in GGUF_FAMILIES:
        raise ModelError(
            f"it is for the architecture {found!r}, and the model is {family!r}: convert the"
            " adapter of this model, or give its directory of PEFT"
        )
    return family


def _pairs(content: AdapterContent) -> tuple[dict[str, dict[str, Tensor]], list[str]]:
    """Return both tensors of each matrix by the matrix's name, and the names of others."""
    assert content.header is not None
    pairs: dict[str, dict[str, Tensor]] = defaultdict(dict)
    others = []
    data = np.frombuffer(content.weights, dtype=np.uint8)
    for name, entry in content.header.tensors.items():
        end = next((end for end in (DOWN, UP) if name.endswith(end)), None)
        if end is None:
            others.append(name)
            continue
        kind, shape, begin = entry["type"], entry["shape"], entry["offset"]
        rows = data[begin : begin + entry["bytes"]].copy().reshape(math.prod(shape[:-1]), -1)
        if kind in BLOCK_SIZES:
            tensor = PackedRows(kind, torch.from_numpy(rows), name).dense()
        else:
            tensor = dequantize_rows(rows, kind, name)
        check_finite(name, tensor)
        pairs[name.removesuffix(end)][end] = tensor.view(shape)
    return pairs, others


def _add(
    assembly: Assembly,
    places: Places,
    config: dict[str, Any],
    name: str,
    content: AdapterContent,
    pair: dict[str, Tensor],
    max_rank: int | None,
) -> bool:
    """Add the change of a matrix. Return False if the model has no such matrix."""
    down, up = pair[DOWN], pair[UP]
    if down.dim() != 2 or up.dim() != 2:
        return False
    stored, is_weight, _ = hf_name(name, config["model_type"]).partition(".weight")
    embedding, head = places.embedding, places.head
    is_embedding = stored == places.config.name("embedding")
    is_head = stored == places.config.name("head") and head is not None
    size = places.size_of(stored)
    if is_embedding:
        size, down = (embedding.inputs, embedding.outputs), down.mT
    elif head is not None and is_head:
        size = (head.outputs, head.inputs)
    if size is None or not is_weight:
        return False
    rank = up.shape[1]
    check_rank(rank, max_rank)
    if not rank or tuple(up.shape) != (size[0], rank) or tuple(down.shape) != (rank, size[1]):
        raise ModelError(
            f"{name} has {DOWN} {list(pair[DOWN].shape)} and {UP} {list(up.shape)}, and the"
            f" model's matrix is [{size[0]}, {size[1]}]: it was trained on another model"
        )
    alpha = _alpha(content)
    up = deinterleave_heads(name, up, config) * (alpha / rank if alpha else 1.0)
    if is_embedding:
        assembly.add_embedding((up @ down).t())
    elif head is not None and is_head:
        assembly.add([(head, up)], down)
    else:
        assembly.add(places.parts(stored, up), down)
    return True


def _alpha(content: AdapterContent) -> float:
    """Return alpha; 0: products are not scaled."""
    assert content.header is not None
    alpha = content.header.metadata.get(ALPHA, 0)
    if not isinstance(alpha, int | float) or not math.isfinite(alpha):
        raise ModelError(f"its header has {ALPHA} = {alpha!r}; it must be a number")
    return float(alpha)
