"""Fingerprint of a model's files, without reading all of the weights."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from quadriga.errors import ModelError
from quadriga.model_files.gguf.parts import gguf_files

# The last bytes of each weights file: two trainings of one model differ there.
TAIL_BYTES = 4096
DIGITS = 16
# Pieces of each weights file, evenly spread, whose bytes tell models apart that differ in few
# tensors, such as one and its fine-tune.
NUM_PIECES, PIECE_BYTES = 512, 1024


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


def weights_digest(weights: Path | None) -> str:
    """Return a hash of many pieces of all weights files, to which changed tensors give another.

    Raises:
        ModelError: a file cannot be read.
    """
    digest = hashlib.sha256()
    try:
        for file in _weight_files(weights):
            size = file.stat().st_size
            digest.update(f"{file.name} {size}".encode())
            with file.open("rb", buffering=0) as opened:
                for piece in range(NUM_PIECES):
                    opened.seek(piece * max(0, size - PIECE_BYTES) // (NUM_PIECES - 1))
                    digest.update(opened.read(PIECE_BYTES))
    except OSError as error:
        raise ModelError(f"cannot read {error.filename}: {error.strerror}") from None
    return digest.hexdigest()


def _weight_files(weights: Path | None) -> list[Path]:
    if weights is None:
        return []
    return sorted(weights.glob("*.safetensors")) if weights.is_dir() else gguf_files(weights)


def _tail(file: Path) -> bytes:
    with file.open("rb") as opened:
        opened.seek(max(0, opened.seek(0, os.SEEK_END) - TAIL_BYTES))
        return opened.read(TAIL_BYTES)
