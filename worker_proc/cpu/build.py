"""Compile the CPU kernels at first use, into a cache, and measure how they multiply bfloat16."""

import contextlib
import ctypes
import hashlib
import logging
import os
import platform
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from quadriga.errors import ConfigError
from quadriga.server.cache import cache_directory
from quadriga.server.processes.machine import NoCompiler, find_compiler
from worker_proc.cpu.levels import (
    AMX,
    FLAGS,
    MACHINE_FLAGS,
    OPENMP,
    SOURCES,
    cpu_features,
    find_prebuilt,
    this_machine,
)
from worker_proc.cpu.program import ComputeType

ARCH_VARIABLE = "QUADRIGA_KERNEL_ARCH"
# Instructions that are forced (`amx`) or forbidden (`no-amx`), with commas between them.
ISA_VARIABLE = "QUADRIGA_KERNEL_ISA"
INSTRUCTIONS = ("amx", "pairs")
# Of Linux: request the state of AMX's tiles for the threads of this process.
ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA = 158, 0x1023, 18
# OpenMP's functions may stay undefined: torch has loaded them before the kernels are loaded.
LINK_FLAGS = ("-undefined", "dynamic_lookup") if sys.platform == "darwin" else ()
COMPILE_TIMEOUT_S = 120.0


def load_kernels() -> ctypes.CDLL:
    """Load the compiled kernels, and compile them if necessary.

    Raises:
        NoCompiler: there are no kernels for the reason that the message gives.
        ConfigError: QUADRIGA_KERNEL_ISA has an unknown word, or forces what is not here.
    """
    try:
        library = _library()
    except OSError as error:
        raise NoCompiler(
            f"the cache {cache_directory()} cannot take the kernels ({error}); make room there, or"
            " set QUADRIGA_CACHE to another directory"
        ) from None
    _share_openmp()
    try:
        return ctypes.CDLL(str(library))
    except OSError as error:
        raise NoCompiler(f"{library} cannot be loaded ({error}); remove it") from None


def kernels_at_hand() -> ctypes.CDLL | None:
    """Return the compiled kernels where nothing has to be compiled for it; None: they are not."""
    try:
        library = _library(may_compile=False)
    except (NoCompiler, OSError):
        return None
    _share_openmp()
    try:
        return ctypes.CDLL(str(library))
    except OSError:
        return None


def _library(may_compile: bool = True) -> Path:
    """Return the path of the kernels for this CPU.

    They come with the installation, or are in the cache, or are compiled now.

    Raises:
        NoCompiler: there are none for the reason that the message gives.
    """
    uses_tiles = _uses_tiles()
    if ARCH_VARIABLE not in os.environ:
        features = cpu_features() if uses_tiles else cpu_features() - AMX
        prebuilt = find_prebuilt(this_machine(), features)
        if prebuilt is not None:
            return prebuilt
    compiler = find_compiler()
    arch = os.environ.get(ARCH_VARIABLE, "native")
    machine = MACHINE_FLAGS.get(this_machine(), ())
    command = [*compiler, *FLAGS, *machine, f"-march={arch}"]
    if not uses_tiles:
        command.append("-DNO_TILES")
    folder = cache_directory() / "kernels"
    library = folder / f"{_key(command)}.so"
    if library.is_file():
        return library
    if not may_compile:
        raise NoCompiler(f"{library} was not compiled yet")
    command_line = " ".join(compiler)
    logging.info("compiling the kernels for this CPU, once: %s; 20 s on two cores", command_line)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        objects = _compile(command, scratch)
        built = f"{scratch}/kernels.so"
        _run([*command, "-shared", *LINK_FLAGS, *objects, "-o", built])
        os.replace(built, library)
    return library


def _forced(instructions: str) -> bool | None:
    """Return whether QUADRIGA_KERNEL_ISA forces or forbids instructions; None: neither."""
    words = [word for word in os.environ.get(ISA_VARIABLE, "").split(",") if word]
    known = [f"{prefix}{name}" for name in INSTRUCTIONS for prefix in ("", "no-")]
    for word in words:
        if word not in known:
            raise ConfigError(
                f"{ISA_VARIABLE} has {word!r}; it takes {', '.join(known)} and commas between them"
            )
    if f"no-{instructions}" in words:
        return False
    return True if instructions in words else None


def _uses_tiles() -> bool:
    """Return whether kernels may use AMX's tiles.

    They need the system's permission, which a sandbox or an old kernel may refuse.
    """
    forced = _forced("amx")
    if forced is not False and _request_tiles():
        return True
    if forced:
        raise ConfigError(
            f"{ISA_VARIABLE} has amx, and this CPU or its system has no AMX tiles; take it away"
        )
    return False


def _request_tiles() -> bool:
    """Ask the system to let this process use AMX's tiles; return whether it can."""
    if this_machine() != "x86_64" or not cpu_features() >= AMX:
        return False
    refused = ctypes.CDLL(None).syscall(ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA)
    return not refused


def _compile(command: list[str], folder: str) -> list[str]:
    """Compile all sources in parallel and return their object files."""
    objects = {str(source): f"{folder}/{source.stem}.o" for source in SOURCES.glob("*.cpp")}
    commands = [[*command, *OPENMP, "-c", "-o", o, source] for source, o in objects.items()]
    with ThreadPoolExecutor() as threads:
        list(threads.map(_run, commands))  # raises the first error
    return list(objects.values())


def _run(command: list[str]) -> None:
    try:
        process = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoCompiler(f"{command[0]} cannot compile the kernels: {error}") from None
    if process.returncode != 0:
        raise NoCompiler(f"{command[0]} cannot compile the kernels: {_first_error(process.stderr)}")


def _key(command: list[str]) -> str:
    """Return a hash of everything that the result of a compilation depends on."""
    digest = hashlib.sha256()
    for source in sorted([*SOURCES.rglob("*.h"), *SOURCES.rglob("*.cpp")]):
        digest.update(source.read_bytes())
    for part in (" ".join(command), platform.machine(), _cpu()):
        digest.update(part.encode() + b"\0")
    digest.update(subprocess.run([command[0], "--version"], capture_output=True).stdout)
    return digest.hexdigest()[:24]


def _cpu() -> str:
    """Return the features of this CPU, which `native` stands for."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return "".join(dict.fromkeys(line for line in lines if line.startswith(("flags", "Features"))))


def _first_error(text: str) -> str:
    lines = text.splitlines()
    return next((line for line in lines if "error" in line), lines[0] if lines else "no message")


def _share_openmp() -> None:
    """Make torch's OpenMP visible to the kernels, so that both use one pool of threads."""
    torch.get_num_threads()
    try:
        maps = Path("/proc/self/maps").read_text().split()
    except OSError:
        return
    for path in maps:
        if path.startswith("/") and Path(path).name.startswith(("libgomp", "libiomp", "libomp")):
            ctypes.CDLL(path, ctypes.RTLD_GLOBAL)
            return


def fastest_compute_type(library: ctypes.CDLL, dtype: torch.dtype) -> ComputeType:
    """Return the fastest way to multiply a dtype on this CPU.

    For bfloat16 it is measured by the first process that loads the library, and kept beside it,
    unless QUADRIGA_KERNEL_ISA forces or forbids pairs.

    Raises:
        ConfigError: pairs are forced, and the CPU has no instructions for them.
    """
    if dtype == torch.float32:
        return ComputeType.FLOAT32
    forced = _forced("pairs")
    if forced is not None:
        if forced and not library.quadriga_bfloat16_instructions():
            raise ConfigError(
                f"{ISA_VARIABLE} has pairs, and the kernels of this CPU have no instructions for"
                " bfloat16; take it away"
            )
        return ComputeType.BFLOAT16_PAIRS if forced else ComputeType.BFLOAT16
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
