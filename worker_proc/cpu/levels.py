"""Kernels for levels of CPUs, which a wheel can bring along beside their sources.

    QUADRIGA_WHEEL_KERNELS=x86_64 python -m build --wheel
    CXX=aarch64-linux-gnu-g++ QUADRIGA_WHEEL_KERNELS=aarch64 python -m build --wheel

They need glibc 2.28 and torch's OpenMP, and no compiler where they are used. Does not import torch:
setup.py imports it.
"""

import os
import platform
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

SOURCES = Path(__file__).parent / "csrc"
PREBUILT = Path(__file__).parent / "prebuilt"
FLAGS = ("-std=c++20", "-O3", "-fPIC", "-w")
# Of one kind of machine. Before it allocates registers, g++ for ARM64 moves loads of the inner
# loops so far ahead that sums are kept in memory.
MACHINE_FLAGS = {"aarch64": ("-fno-schedule-insns",)}
# Only for the compiler: the linker must not add a second OpenMP beside torch's.
OPENMP = ("-Xpreprocessor", "-fopenmp")
GLIBC = "2_28"  # of the wheel's tag


class Level(NamedTuple):
    """CPUs for which kernels are compiled.

    Attributes:
        name: of the kernels' file.
        flags: of the compiler.
        features: that a CPU must have, as /proc/cpuinfo names them.
    """

    name: str
    flags: tuple[str, ...]
    features: frozenset[str]


_V3 = frozenset(["avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"])
_V4 = _V3 | frozenset(["avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"])
_BF16 = _V4 | frozenset(["avx512_vnni", "avx512_bf16", "avx512vbmi"])
# Its tiles need the system's permission, too.
AMX = frozenset(["amx_tile", "amx_bf16", "amx_int8"])
_BF16_FLAGS = ("-march=x86-64-v4", "-mavx512vnni", "-mavx512bf16", "-mavx512vbmi")
_ARM_FLAGS = MACHINE_FLAGS["aarch64"]
_ARM_8_2 = frozenset(["asimddp", "asimdrdm", "atomics"])
# By machine, the best first.
LEVELS = {
    "x86_64": (
        Level(
            "x86-64-v4-amx",
            (*_BF16_FLAGS, "-mamx-tile", "-mamx-bf16", "-mamx-int8"),
            _BF16 | AMX,
        ),
        Level("x86-64-v4-bf16", _BF16_FLAGS, _BF16),
        Level("x86-64-v3", ("-march=x86-64-v3",), _V3),
    ),
    "aarch64": (
        Level(
            "armv8.6",
            ("-march=armv8.6-a+bf16+i8mm+dotprod", *_ARM_FLAGS),
            _ARM_8_2 | {"bf16", "i8mm"},
        ),
        Level("armv8.2", ("-march=armv8.2-a+dotprod", *_ARM_FLAGS), _ARM_8_2),
    ),
}


def cpu_features() -> frozenset[str]:
    """Return the features of this machine's CPU; empty where the system does not say them."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    named = (line for line in lines if line.startswith(("flags", "Features")))
    return frozenset(next(named, "").partition(":")[2].split())


def find_prebuilt(machine: str, features: frozenset[str]) -> Path | None:
    """Return the best kernels that this installation has for a CPU; None: it has none."""
    for level in LEVELS.get(machine, ()):
        library = PREBUILT / f"{level.name}.so"
        if level.features <= features and library.is_file():
            return library
    return None


def build(machine: str, folder: Path) -> list[Path]:
    """Compile the kernels for every level of a machine, with the compiler that CXX names.

    Args:
        machine: as platform.machine() names it.
        folder: where the libraries are written.

    Raises:
        ValueError: there are no levels for the machine.
        subprocess.CalledProcessError: the compiler fails.
    """
    if machine not in LEVELS:
        raise ValueError(f"QUADRIGA_WHEEL_KERNELS is {machine!r}: it must be one of {[*LEVELS]}")
    compiler = os.environ.get("CXX", "g++")
    folder.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        return [_build_level(compiler, level, folder, threads) for level in LEVELS[machine]]


def _build_level(compiler: str, level: Level, folder: Path, threads: ThreadPoolExecutor) -> Path:
    def run(*arguments: object) -> None:
        command = [compiler, *FLAGS, *level.flags, *map(str, arguments)]
        subprocess.run(command, check=True)

    sources = sorted(SOURCES.glob("*.cpp"))
    objects = [folder / f"{level.name}-{source.stem}.o" for source in sources]
    pairs = zip(sources, objects, strict=True)
    list(threads.map(lambda pair: run(*OPENMP, "-c", "-o", pair[1], pair[0]), pairs))
    library = folder / f"{level.name}.so"
    run("-shared", "-Wl,--strip-all", *objects, "-o", library)
    for path in objects:
        path.unlink()
    return library


def this_machine() -> str:
    """Return the machine, as LEVELS names it."""
    return {"arm64": "aarch64", "AMD64": "x86_64"}.get(platform.machine(), platform.machine())
