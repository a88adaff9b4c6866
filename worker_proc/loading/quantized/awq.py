"""AWQ checkpoints of version gemm, as AutoAWQ writes them (Lin et al. 2023, 2306.00978).

qweight [inputs, outputs / 8] int32, qzeros [groups, outputs / 8] int32, scales [groups, outputs].
The 8 codes of an int32 are outputs 0, 2, 4, 6, 1, 3, 5, 7, the lowest first.
"""

import torch
from torch import Tensor

from quadriga.model_files.quantized.scheme import WeightScheme
from worker_proc.loading.quantized.coded_rows import (
    CodedRows,
    CodeKind,
    LayerTensors,
    group_size_of,
    unpack_nibbles,
)

NIBBLE_OF_OUTPUT = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7])


def read_awq(tensors: LayerTensors, scheme: WeightScheme) -> CodedRows:
    """Return the matrix of a layer."""
    packed = tensors["qweight"]
    inputs, outputs = packed.shape[0], packed.shape[1] * 8
    return CodedRows(
        CodeKind.INT4,
        (outputs, inputs),
        group_size_of(inputs, scheme.group_size),
        lambda: _unpack(packed),
        scale=tensors["scales"].t().contiguous(),
        zero=_unpack(tensors["qzeros"]),
        stored_bytes=tensors.num_bytes,
    )


def _unpack(packed: Tensor) -> Tensor:
    """Unpack [rows, words] int32 to [8 * words, rows] uint8."""
    nibbles = unpack_nibbles(packed).view(len(packed), -1, 8)
    return nibbles[:, :, NIBBLE_OF_OUTPUT].flatten(1).t().contiguous()
