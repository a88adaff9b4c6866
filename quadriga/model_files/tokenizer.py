"""Loading a tokenizer: the one thing that the front door and the detokenizer do alike."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

from quadriga.errors import ModelError

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def load_tokenizer(directory: Path) -> "Tokenizer":
    """The tokenizer of `directory`/tokenizer.json, without truncation and padding.

    Its own thread pool is off: our processes bring their own threads. ModelError where the file
    cannot be read.
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
