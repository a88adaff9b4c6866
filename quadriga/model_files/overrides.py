"""Resolution of --tokenizer and --chat-template, which replace files of the model."""

from pathlib import Path

from quadriga import disk
from quadriga.errors import ModelError
from quadriga.model_files.builtin.catalog import BUILTINS
from quadriga.model_files.builtin.fetch import builtin_weights
from quadriga.model_files.gguf_header import header_files
from quadriga.model_files.gpt2_sizes import find_size
from quadriga.model_files.hub import looks_like_a_path, snapshot

REMEDY = "give --tokenizer a directory or a .gguf file"


def find_tokenizer(source: str, show_progress: bool) -> Path:
    """Return a directory of tokenizer.json and tokenizer_config.json.

    Args:
        source: directory or file in it, .gguf file, Hub id, or a built-in name.
        show_progress: draw progress bars on stderr.

    Raises:
        ModelError: the tokenizer cannot be found or fetched.
    """
    if source in BUILTINS:
        return header_files(builtin_weights(show_progress, source))
    path = Path(source).expanduser().absolute()
    if path.name == "tokenizer.json" and path.is_file():
        return path.parent
    if path.is_file():
        return header_files(path)
    if path.is_dir():
        if not _has_tokenizer(path):
            raise ModelError(f"--tokenizer {source}: the directory has no tokenizer.json")
        return path
    if looks_like_a_path(source):
        what = "it is no regular file" if path.exists() else "there is no such file or directory"
        raise ModelError(f"--tokenizer {source}: {what}")
    size = find_size(source)
    hub_id = source if size is None else size.hub_id
    try:
        directory = snapshot(
            hub_id, False, show_progress, is_complete=_has_tokenizer, remedy=REMEDY
        )
    except ModelError as error:
        raise ModelError(f"--tokenizer {source}: {error}") from None
    if not _has_tokenizer(directory):
        raise ModelError(f"--tokenizer {source}: the Hub's repository has no tokenizer.json")
    return directory


def find_chat_template(file: str) -> Path:
    """Return the absolute path of a chat template. Raise ModelError if it cannot be read."""
    path = Path(file).expanduser().absolute()
    try:
        disk.read_text(path)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ModelError(f"--chat-template {file} cannot be read: {reason}") from None
    return path


def _has_tokenizer(directory: Path) -> bool:
    return (directory / "tokenizer.json").is_file()
