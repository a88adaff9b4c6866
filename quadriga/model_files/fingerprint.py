"""Fingerprint of a model's files, without reading all of the weights."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from quadriga.errors import ModelError

# The last bytes of each weights file: two trainings of one model differ there.
TAIL_BYTES = 4096
DIGITS = 16


def fingerprint(config: dict[str, Any], tokenizer_dir: Path, weights: Path | None) -> str:
    """Return a short text that identifies a model, independent of the location of its files.

    It depends on the configuration, the tokenizer, and names, sizes and last bytes of the weights.

    Raises:
        ModelError: a file cannot be read.
    """
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    try:
        tokenizer = tokenizer_dir / "tokenizer.json"
        if tokenizer.is_file():
            digest.update(tokenizer.read_bytes())
        for file in _weight_files(weights):
            digest.update(f"{file.name} {file.stat().st_size}".encode())
            digest.update(_tail(file))
    except OSError as error:
        raise ModelError(f"cannot read {error.filename}: {error.strerror}") from None
    return digest.hexdigest()[:DIGITS]


def _weight_files(weights: Path | None) -> list[Path]:
    if weights is None:
        return []
    return sorted(weights.glob("*.safetensors")) if weights.is_dir() else [weights]


def _tail(file: Path) -> bytes:
    with file.open("rb") as opened:
        opened.seek(max(0, opened.seek(0, os.SEEK_END) - TAIL_BYTES))
        return opened.read(TAIL_BYTES)
