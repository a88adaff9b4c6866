"""Loading of a tokenizer, for the frontend and the detokenizer, and of its chat template."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quadriga.errors import ModelError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# Key of tokenizer_config.json: the names of a GGUF's tokens for filling in the middle, by role.
FILL_TOKENS_KEY = "fill_tokens"


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


def template_source(tokenizer_dir: Path, config: dict[str, Any]) -> str | None:
    """Return the text of a directory's chat template; None if it has none.

    Args:
        tokenizer_dir: The directory.
        config: Contents of its tokenizer_config.json.
    """
    file = tokenizer_dir / "chat_template.jinja"
    if file.exists():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    return _named_templates(template).get("default") if isinstance(template, list) else template


def tool_template_source(tokenizer_dir: Path, config: dict[str, Any]) -> str | None:
    """Return the text of a directory's template for chats with tools; None if it has no other one.

    Args:
        tokenizer_dir: The directory.
        config: Contents of its tokenizer_config.json.
    """
    file = tokenizer_dir / "additional_chat_templates" / "tool_use.jinja"
    if file.exists():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    return _named_templates(template).get("tool_use") if isinstance(template, list) else None


def _named_templates(entries: list[dict[str, str]]) -> dict[str, str]:
    return {entry["name"]: entry["template"] for entry in entries}
