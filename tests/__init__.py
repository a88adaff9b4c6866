"""What has to be set before torch and Triton are imported.

Torch's threads wait for each other as a worker's do: with libgomp's own patience a test takes ten
times as long where something else keeps a core busy.

Triton kernels run on a card if there is one, else in Triton's interpreter. Triton decides that when
a kernel is defined, and servers that tests start inherit it.
"""

import os

from worker_proc.main import SPIN_COUNT

os.environ.setdefault("GOMP_SPINCOUNT", str(SPIN_COUNT))

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
