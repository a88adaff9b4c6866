"""Set variables that torch and Triton read when they are imported.

Torch's threads spin as long as a worker's: with libgomp's default a test takes ten times as long
beside another busy process.

Triton kernels run on a GPU if there is one, and else in Triton's interpreter. Triton decides that
when a kernel is defined, and servers that tests start inherit the variable.
"""

import os

from worker_proc.main import SPIN_COUNT

os.environ.setdefault("GOMP_SPINCOUNT", str(SPIN_COUNT))

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
