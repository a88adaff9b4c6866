"""Load the tokenizer with which the bench prepares prompts."""

from pathlib import Path
from typing import TYPE_CHECKING

from quadriga.config.server_config import ModelArgs
from quadriga.errors import ConfigError
from quadriga.extras import install_command

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def tokenizer_of(name: str, model: ModelArgs) -> "Tokenizer":
    """Return the tokenizer of a directory or model `name`, or of `model` if the name is "".

    Raises:
        ModelError: The model has no tokenizer.
        ConfigError: A package that loads it is not installed.
    """
    try:
        from quadriga.model_files.resolve import resolve_model
        from quadriga.model_files.tokenizer import load_tokenizer
    except ImportError as error:
        raise ConfigError(
            f"the bench needs a tokenizer, and {error.name} is not installed:"
            f" {install_command('serve')}, or use --random-input-len with --prompt-form ids"
        ) from None
    directory = Path(name)
    if name and (directory / "tokenizer.json").is_file():
        return load_tokenizer(directory)
    wanted = ModelArgs(model=name) if name else model
    return load_tokenizer(resolve_model(wanted, show_progress=True).tokenizer_dir)
