"""Models of the Hugging Face Hub: from the local cache, else from the network in bounded time."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from quadriga.errors import ModelError
from quadriga.programs import install_command

# Bounds the Hub's answer whether it has a model, name resolution included.
ANSWER_TIMEOUT_S = 8.0
_SMALL_FILES = ["*.json", "*.jinja", "tokenizer*", "vocab*", "merges.txt"]
_IGNORED_FILES = ["*/*", "consolidated*", "*.h5", "*.msgpack"]

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
        model: Hub id.
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
