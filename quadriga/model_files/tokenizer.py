"""Loading of a tokenizer, for the frontend and the detokenizer."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

from quadriga.errors import ModelError

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def load_tokenizer(directory: Path) -> "Tokenizer":
    """Load `directory`/tokenizer.json, without truncation and padding.

    The library's thread pool is switched off: the processes have threads of their own.

    Raises:
        ModelError: the file cannot be read.
    """
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    from tokenizers import Tokenizer

    path = directory / "tokenizer.json"
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise ModelError(f"cannot read the tokenizer {path}: {error}") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
