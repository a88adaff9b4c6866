"""The Triton kernels compile for GPUs that are not there, and none is compiled while serving."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import tests.triton_device  # noqa: F401 (skips where there is no Triton)

ROOT = Path(__file__).resolve().parents[3]
SECONDS = 500


def run(module: str, *flags: str, cache: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(cache)}
    command = [sys.executable, "-W", "ignore", "-m", module, *flags]
    return subprocess.run(
        command, cwd=ROOT, env=environment, timeout=SECONDS, capture_output=True, text=True
    )


@pytest.mark.timeout(SECONDS)
def test_kernels_fit_the_shared_memory_and_registers_of_gpus(tmp_path: Path) -> None:
    result = run("tests.triton_compile", cache=tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.timeout(SECONDS)
@pytest.mark.parametrize(
    ("model", "flags"),
    [("llama", ()), ("gpt2", ()), ("llama", ("--disable-cuda-graph",))],
)
def test_no_variant_of_a_kernel_is_first_met_while_serving(
    model: str, flags: tuple[str, ...], tmp_path: Path
) -> None:
    result = run("tests.triton_variants", model, "--steps", "40", *flags, cache=tmp_path)
    assert "0 variants first met while serving" in result.stdout, result.stdout + result.stderr
    assert ", 0 questions" in result.stdout
