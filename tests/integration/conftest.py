"""Models that several integration tests compare with the server."""

from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def model(llama_dir: Path) -> Any:
    """Load the tiny Llama in transformers, in float32."""
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(llama_dir, dtype=torch.float32).eval()
