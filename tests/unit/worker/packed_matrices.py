"""Matrices in the formats of checkpoints, with random values."""

import numpy as np
import torch
from torch import Tensor

from quadriga.server.models.formats.quantization import BLOCK_SIZES
from worker_proc.models.quantized_weights import PackedRows

# Bytes at which a block has numbers in float16; 0 in other types.
HALVES = {
    "Q4_1": (0, 2),
    "Q5_1": (0, 2),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "MXFP4": (),
}
WIDTH = 512


def random_rows(kind: str, count: int, width: int = WIDTH, seed: int = 0) -> PackedRows:
    """Return rows of random bytes, with scales that do not overflow."""
    random = np.random.default_rng(seed)
    size = BLOCK_SIZES[kind]
    blocks = random.integers(0, 256, (count, width // size.weights, size.num_bytes), np.uint8)
    for at in HALVES.get(kind, (0,)):
        halves = random.normal(0, 0.01, (*blocks.shape[:2], 1)).astype(np.float16)
        blocks[..., at : at + 2] = halves.view(np.uint8)
    if kind == "MXFP4":
        blocks[..., 0] = random.integers(118, 128, blocks.shape[:2])
    return PackedRows(kind, torch.from_numpy(blocks.reshape(count, -1)))


def random_inputs(count: int) -> Tensor:
    """Return inputs [count, WIDTH]."""
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(count))
