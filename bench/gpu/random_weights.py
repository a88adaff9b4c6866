"""Random weights as files that every server loads."""

import shutil
from pathlib import Path
from typing import Any

import torch
import transformers

from bench.gpu.prepare import TOKENIZER_FILES
from bench.models.files import write_filled_tokenizer


def write_weights(source: Path, directory: Path) -> None:
    """Write a model with the config.json and tokenizer of a directory, in bfloat16."""
    library: Any = transformers
    torch.manual_seed(0)
    config = library.AutoConfig.from_pretrained(source)
    model = library.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(directory)
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copy(source / name, directory)
    write_filled_tokenizer(
        source / "tokenizer.json", config.to_dict(), directory / "tokenizer.json"
    )
