"""Compiles the kernels at first use, by the compiler at hand, into a cache."""

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from quadriga.errors import ConfigError
from quadriga.model_files.cache import cache_directory

SOURCES = Path(__file__).parent / "csrc"
ARCH_VARIABLE, COMPILER_VARIABLE = "QUADRIGA_KERNEL_ARCH", "CXX"
FLAGS = ("-std=c++20", "-O3", "-fPIC", "-w")
OPENMP = ("-Xpreprocessor", "-fopenmp")
"""For the compiler alone: the linker must not bring a second OpenMP beside torch's."""
COMPILE_TIMEOUT = 120.0
"""Seconds; it takes five to ten."""


class NoCompiler(ConfigError):
    """There is no compiler, or it cannot compile the kernels."""


def load_kernels(say: Callable[[str], None]) -> ctypes.CDLL:
    """The compiled kernels. `say` hears when something takes long. NoCompiler where there are
    none: the message says why."""
    try:
        library = _library(say)
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


def _library(say: Callable[[str], None]) -> Path:
    """The kernels of these sources for this CPU, compiled now where the cache has none."""
    compiler = _compiler()
    command = [*compiler, *FLAGS, *_target()]
    folder = cache_directory() / "kernels"
    library = folder / f"{_key(command)}.so"
    if library.is_file():
        return library
    say(f"compiling the kernels for this CPU, once: {' '.join(compiler)}, a few seconds")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        objects = _compile(command, scratch)
        built = f"{scratch}/kernels.so"
        _run([*command, "-shared", *_undefined_is_fine(), *objects, "-o", built])
        os.replace(built, library)
    return library


def _compile(command: list[str], folder: str) -> list[str]:
    """The objects of all sources, made at the same time."""
    objects = {str(source): f"{folder}/{source.stem}.o" for source in SOURCES.glob("*.cpp")}
    with ThreadPoolExecutor() as threads:
        list(
            threads.map(
                _run, ([*command, *OPENMP, "-c", *("-o", o), s] for s, o in objects.items())
            )
        )
    return list(objects.values())


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_TIMEOUT)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoCompiler(f"{command[0]} cannot compile the kernels: {error}") from None
    if done.returncode != 0:
        raise NoCompiler(f"{command[0]} cannot compile the kernels: {_first_error(done.stderr)}")


def _compiler() -> list[str]:
    """The C++ compiler's command. NoCompiler where there is none."""
    named = os.environ.get(COMPILER_VARIABLE)
    if named is not None:
        command = shlex.split(named)
        if not command or shutil.which(command[0]) is None:
            raise NoCompiler(f"{COMPILER_VARIABLE} is {named!r}, which is not a command here")
        return command
    for name in ("g++", "clang++", "c++"):
        if shutil.which(name) is not None:
            return [name]
    raise NoCompiler("no C++ compiler is here (g++ or clang++)")


def _target() -> tuple[str, ...]:
    return (f"-march={os.environ.get(ARCH_VARIABLE, 'native')}",)


def _undefined_is_fine() -> tuple[str, ...]:
    """OpenMP's functions are found when the kernels are loaded."""
    return ("-undefined", "dynamic_lookup") if sys.platform == "darwin" else ()


def _key(command: list[str]) -> str:
    """Of everything that the result depends on."""
    digest = hashlib.sha256()
    for source in sorted([*SOURCES.glob("*.h"), *SOURCES.glob("*.cpp")]):
        digest.update(source.read_bytes())
    version = subprocess.run([command[0], "--version"], capture_output=True).stdout
    for part in (" ".join(command), platform.machine(), _cpu()):
        digest.update(part.encode() + b"\0")
    digest.update(version)
    return digest.hexdigest()[:24]


def _cpu() -> str:
    """What `native` means here."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return "".join(dict.fromkeys(line for line in lines if line.startswith(("flags", "Features"))))


def _first_error(text: str) -> str:
    lines = text.splitlines()
    return next((line for line in lines if "error" in line), lines[0] if lines else "no message")


def _share_openmp() -> None:
    """Make torch's own OpenMP visible to the kernels, so that one pool of threads has the cores."""
    torch.get_num_threads()
    try:
        maps = Path("/proc/self/maps").read_text().split()
    except OSError:
        return
    for path in maps:
        if path.startswith("/") and Path(path).name.startswith(("libgomp", "libiomp", "libomp")):
            ctypes.CDLL(path, ctypes.RTLD_GLOBAL)
            return
