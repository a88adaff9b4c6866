"""The Triton kernels compile for GPUs that are not there, and none is compiled while serving."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import tests.triton_device  # noqa: F401 (skips where there is no Triton)
from tests import EVERYTHING

ROOT = Path(__file__).resolve().parents[3]
# All shapes for all GPUs take half an hour.
FLAGS, SECONDS = (("--matrix",), 3600) if EVERYTHING else ((), 500)


CACHE = ROOT / ".pytest_cache" / "triton"  # what has not changed is compiled once

# GPT-2, Llama and Qwen3-MoE, each with and without CUDA graphs.
NUM_CASES = 6


def run(module: str, *flags: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(CACHE)}
    command = [sys.executable, "-W", "ignore", "-m", module, *flags]
    return subprocess.run(
        command, cwd=ROOT, env=environment, timeout=SECONDS, capture_output=True, text=True
    )


@pytest.mark.timeout(SECONDS)
def test_kernels_fit_the_shared_memory_and_registers_of_gpus() -> None:
    result = run("tests.triton_compile", *FLAGS)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.timeout(SECONDS)
@pytest.mark.parametrize("flags", [(), ("--adapters",)])
def test_no_variant_of_a_kernel_is_first_met_while_serving(flags: tuple[str, ...]) -> None:
    result = run("tests.triton_variants", "--steps", "40", *flags)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count(" 0 variants first met while serving") == NUM_CASES
    assert result.stdout.count(", 0 questions") == NUM_CASES
    assert result.stdout.count(" steps with drafts") == NUM_CASES
    assert " 0 steps with drafts" not in result.stdout
