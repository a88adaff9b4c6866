"""The Triton kernels compile for a GPU, whether or not there is one."""

import os
import subprocess
import sys
from pathlib import Path

import tests.triton_device  # noqa: F401 (skips where there is no Triton)

ROOT = Path(__file__).resolve().parents[3]


def test_every_kernel_compiles_for_a_gpu(tmp_path: Path) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-W", "ignore", "-m", "tests.triton_compile"]
    subprocess.run(command, cwd=ROOT, env=environment, check=True, timeout=100)
