"""Load the tokenizer with which the bench prepares prompts."""

from typing import TYPE_CHECKING

from quadriga.config.model_args import ModelArgs
from quadriga.errors import ConfigError
from quadriga.programs import install_command

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def tokenizer_of(name: str, model: ModelArgs) -> "Tokenizer":
    """Return the tokenizer of a directory or model `name`, or of `model` if the name is "".

    Raises:
        ModelError: The model has no tokenizer.
        ConfigError: A package that loads it is not installed.
    """
    try:
        from quadriga.model_files.overrides import find_tokenizer
        from quadriga.model_files.resolve import resolve_model
        from quadriga.model_files.tokenizer import load_tokenizer
    except ImportError as error:
        raise ConfigError(
            f"the bench needs a tokenizer, and {error.name} is not installed:"
            f" {install_command('serve')}, or use --random-input-len with --prompt-form ids"
        ) from None
    if name:
        return load_tokenizer(find_tokenizer(name, show_progress=True))
    return load_tokenizer(resolve_model(model, show_progress=True).tokenizer_dir)
