"""Set variables that torch and Triton read when they are imported.

Each worker of a parallel run keeps to its own share of the CPUs.

Torch's threads spin as long as a worker's: with libgomp's default a test takes ten times as long
beside another busy process.

Triton kernels run on a GPU if there is one, and else in Triton's interpreter. Triton decides that
when a kernel is defined, and servers that tests start inherit the variable.
"""

import ctypes
import os

from tests.cpu_shares import keep_to_own_share
from worker_proc.main import SPIN_COUNT


def _has_cuda() -> bool:
    """Return whether torch finds a CUDA device.

    Importing torch takes seconds, so torch is asked only where NVIDIA's driver is installed.
    """
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    import torch

    return torch.cuda.is_available()


EVERYTHING = bool(os.environ.get("QUADRIGA_TEST_EVERYTHING"))
"""Tests with many cases run all of them, not only a choice."""

keep_to_own_share()
os.environ.setdefault("GOMP_SPINCOUNT", str(SPIN_COUNT))
if not _has_cuda():
    os.environ.setdefault("TRITON_INTERPRET", "1")
