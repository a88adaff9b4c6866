"""The tokenizer on the bench's side, where it needs one."""

from pathlib import Path
from typing import TYPE_CHECKING

from quadriga.config.server_config import ModelArgs
from quadriga.errors import ConfigError

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def tokenizer_of(name: str, model: ModelArgs) -> "Tokenizer":
    """That of a directory or model, where one is named, else the model's as the front door loads
    it. ModelError where there is none, ConfigError where what loads it is not installed."""
    try:
        from quadriga.model_files.resolve import resolve_model
        from quadriga.model_files.tokenizer import load_tokenizer
    except ImportError as error:
        raise ConfigError(
            f"a tokenizer is needed on this side, and {error.name} is not installed:"
            " pip install 'quadriga[serve]', or use --random-input-len with --prompt-form ids"
        ) from None
    directory = Path(name)
    if name and (directory / "tokenizer.json").is_file():
        return load_tokenizer(directory)
    wanted = ModelArgs(model=name) if name else model
    return load_tokenizer(resolve_model(wanted, show_progress=True).tokenizer_dir)
