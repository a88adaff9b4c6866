"""The kernels compute the same on every CPU they are compiled for; ARM64 runs under QEMU.

The levels are those of CPUs that are rented: Neoverse N1 (Graviton 2, Ampere Altra), N2 and V2
(Graviton 4, Axion, Cobalt, Grace). The harness is tests/kernels/harness.cpp.
"""

import os
import platform
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from worker_proc.cpu.levels import FLAGS, MACHINE_FLAGS, OPENMP, SOURCES

# The compiler needs a core for a minute, which other tests share.
pytestmark = pytest.mark.timeout(900)

HARNESS = Path(__file__).parents[2] / "kernels" / "harness.cpp"
CROSS_COMPILER, CROSS_OBJDUMP = "aarch64-linux-gnu-g++", "aarch64-linux-gnu-objdump"
QEMU = "qemu-aarch64-static"
TIMEOUT_S = 600.0
# By level, the CPU that QEMU is, and the instructions that multiply.
ARM_LEVELS = {
    "armv8.2-a+dotprod": ("neoverse-n1", ("sdot",)),
    "armv8.6-a+bf16+i8mm": ("max,pauth-impdef=on", ("usmmla", "usdot", "bfmmla", "bfdot")),
}
# Compiled, and not run: the kernels have no loop of their own for it, but compilers do.
ARM_COMPILED_ONLY = ("armv9-a+bf16+i8mm",)

needs_cross_compiler = pytest.mark.skipif(
    not shutil.which(CROSS_COMPILER), reason=f"no {CROSS_COMPILER} is here (g++-aarch64-linux-gnu)"
)
needs_qemu = pytest.mark.skipif(
    not shutil.which(QEMU), reason=f"no {QEMU} is here (qemu-user-static)"
)
needs_avx512 = pytest.mark.skipif(
    " avx512_bf16" not in Path("/proc/cpuinfo").read_text(), reason="this CPU has no AVX-512 BF16"
)


def run(*command: str | Path) -> str:
    """Run a command and return its output, which a failure shows."""
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=TIMEOUT_S, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def compile_kernels(compiler: str, flags: tuple[str, ...], folder: Path) -> list[Path]:
    """Compile each source of the kernels, and return the objects."""

    def compile_one(source: Path) -> Path:
        compiled = folder / f"{source.stem}.o"
        run(compiler, *FLAGS, *OPENMP, *flags, "-I", SOURCES, "-c", "-o", compiled, source)
        return compiled

    with ThreadPoolExecutor(os.cpu_count()) as threads:
        return list(threads.map(compile_one, sorted([*SOURCES.glob("*.cpp"), HARNESS])))


def assert_passed(output: str) -> None:
    last = output.splitlines()[-1]
    assert re.fullmatch(r"\d\d+ passed, 0 failed", last), output


@needs_cross_compiler
@needs_qemu
@pytest.mark.parametrize("level", ARM_LEVELS)
def test_arm64_multiplies_by_its_instructions_as_plain_loops_do(level: str, tmp_path: Path) -> None:
    cpu, instructions = ARM_LEVELS[level]
    objects = compile_kernels(
        CROSS_COMPILER, (*MACHINE_FLAGS["aarch64"], f"-march={level}"), tmp_path
    )
    code = "".join(run(CROSS_OBJDUMP, "-d", "--no-show-raw-insn", one) for one in objects)
    for name in instructions:
        assert len(re.findall(rf"\t{name}\t", code)) > 100, f"{name} is used"
    harness = tmp_path / "harness"
    run(CROSS_COMPILER, "-static", "-fopenmp", *objects, "-o", harness)
    assert_passed(run(QEMU, "-cpu", cpu, harness))


@needs_cross_compiler
@pytest.mark.parametrize("level", ARM_COMPILED_ONLY)
def test_newer_levels_of_arm64_compile(level: str, tmp_path: Path) -> None:
    run(CROSS_COMPILER, *FLAGS, f"-march={level}", "-c", SOURCES / "quantized.cpp",
        "-o", tmp_path / "quantized.o")  # fmt: skip


@needs_avx512
@pytest.mark.skipif(platform.machine() != "x86_64", reason="AMX is of x86-64")
def test_tiles_multiply_as_plain_loops_do(tmp_path: Path) -> None:
    """By functions that do what AMX's instructions do, as few machines have them."""
    flags = ("-march=native", "-DEMULATED_TILES")
    objects = compile_kernels("g++", flags, tmp_path)
    harness = tmp_path / "harness"
    run("g++", "-fopenmp", *objects, "-o", harness)
    assert_passed(run(harness))
