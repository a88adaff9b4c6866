"""How this CPU multiplies bfloat16 faster: measured once, so that a restart has the same bits."""

import contextlib
import ctypes
import logging
import os
from pathlib import Path

import torch

from worker_proc.cpu.program import ComputeType


def fastest_compute_type(library: ctypes.CDLL, dtype: torch.dtype) -> ComputeType:
    """Return the fastest way to multiply a dtype on this CPU.

    For bfloat16 it is measured by the first process that loads the library, and kept beside it.
    """
    if dtype == torch.float32:
        return ComputeType.FLOAT32
    kept = Path(library._name).with_suffix(".bfloat16")
    try:
        fastest = ComputeType[kept.read_text()]
    except (OSError, KeyError):
        fastest = _measure(library)
        _keep(kept, fastest)
    if fastest is ComputeType.BFLOAT16:
        library.quadriga_vector_bits.restype = ctypes.c_int64
        logging.info(
            "bfloat16 becomes float32 as it is multiplied, by vectors of %d bits: the fastest way"
            " on this CPU",
            library.quadriga_vector_bits(),
        )
    return fastest


def _measure(library: ctypes.CDLL) -> ComputeType:
    library.quadriga_bfloat16.restype = ctypes.c_int64
    return ComputeType(library.quadriga_bfloat16())


def _keep(path: Path, fastest: ComputeType) -> None:
    """Write the choice; where the cache takes nothing, every start measures again."""
    written = path.with_name(f"{path.name}.{os.getpid()}")
    with contextlib.suppress(OSError):
        written.write_text(fastest.name)
        written.replace(path)
