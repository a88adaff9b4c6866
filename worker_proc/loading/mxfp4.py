"""Decode the MXFP4 weights of gpt-oss, which are a tensor of codes and one of scales.

Format: OCP Microscaling Formats 1.0, https://www.opencompute.org/documents.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from quadriga.errors import ModelError
from worker_proc.loading.gguf_blocks import PackedRows

CODES, SCALES = "_blocks", "_scales"
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
SCALE_BIAS = 127


def with_mxfp4_decoded(
    tensors: Iterator[tuple[str, Tensor | PackedRows]],
) -> Iterator[tuple[str, Tensor | PackedRows]]:
    """Yield the tensors of a checkpoint, those in MXFP4 as [experts, inputs, outputs] bfloat16.

    Raises:
        ModelError: Codes have no scales, or scales no codes.
    """
    waiting: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors:
        end = next((end for end in (CODES, SCALES) if name.endswith(end)), None)
        if end is None or not isinstance(tensor, Tensor):
            yield name, tensor
            continue
        whole = name.removesuffix(end)
        parts = waiting.setdefault(whole, {})
        parts[end] = tensor
        if len(parts) == 2:
            del waiting[whole]
            yield whole, decode(parts[CODES], parts[SCALES]).transpose(1, 2)
    if waiting:
        name, parts = next(iter(waiting.items()))
        raise ModelError(
            f"the checkpoint has {name}{next(iter(parts))}, but not the other one of"
            f" {name}{CODES} and {name}{SCALES}; fetch the files again"
        )


def decode(codes: Tensor, scales: Tensor) -> Tensor:
    """Return the exact values [experts, outputs, inputs] in bfloat16.

    Args:
        codes: [experts, outputs, groups, 16] uint8, two codes in a byte, the first in the low half.
        scales: [experts, outputs, groups] uint8, exponents of 2 plus SCALE_BIAS.
    """
    experts, outputs, groups, half = codes.shape
    if tuple(scales.shape) != (experts, outputs, groups):
        raise ModelError(
            f"MXFP4 codes of {list(codes.shape)} have scales of {list(scales.shape)}; they need"
            f" {[experts, outputs, groups]}: fetch the files again"
        )
    table = torch.tensor([*VALUES, *(-value for value in VALUES)], device=codes.device)
    values = codes.new_empty((experts, outputs, groups * half * 2), dtype=torch.bfloat16)
    for number in range(experts):
        pairs = torch.stack((codes[number] & 15, codes[number] >> 4), -1).flatten(-2)
        exponents = scales[number].int().sub(SCALE_BIAS).unsqueeze(-1)
        values[number] = torch.ldexp(table[pairs.int()], exponents).flatten(1)
    return values
