"""GPTQ checkpoints, as GPTQModel and AutoGPTQ write them (Frantar et al. 2022, 2210.17323).

qweight [inputs * bits / 32, outputs] int32 has the codes; qzeros [groups, outputs * bits / 32]
int32 the zeros, in layout gptq less one; scales [groups, outputs]; g_idx [inputs] the group of each
input.
"""

import torch

from quadriga.model_files.quantized.scheme import WeightScheme
from worker_proc.loading.quantized.coded_rows import (
    CodedRows,
    CodeKind,
    LayerTensors,
    group_size_of,
    order_of,
    unpack_words,
)

# One in each code of an int32. A zero of 0 borrows from its neighbours when one is subtracted.
ONES = {4: 0x11111111, 8: 0x01010101}


def read_gptq(tensors: LayerTensors, scheme: WeightScheme) -> CodedRows:
    """Return the matrix of a layer."""
    bits, packed = scheme.bits, tensors["qweight"]
    inputs, outputs = packed.shape[0] * 32 // bits, packed.shape[1]
    group_size = group_size_of(inputs, scheme.group_size)
    zeros = tensors["qzeros"]
    if scheme.layout == "gptq":
        zeros = zeros + ONES[bits]
    order = order_of(tensors["g_idx"], group_size, tensors) if "g_idx" in tensors else None

    def unpack() -> torch.Tensor:
        codes = unpack_words(packed.t(), bits)
        return codes if order is None else codes[:, order]

    return CodedRows(
        CodeKind.INT4 if bits == 4 else CodeKind.INT8,
        (outputs, inputs),
        group_size,
        unpack,
        scale=tensors["scales"].t().contiguous(),
        zero=unpack_words(zeros, bits)[:, :outputs].t().contiguous(),
        order=order,
        stored_bytes=tensors.num_bytes,
    )
