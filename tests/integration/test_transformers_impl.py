"""Models of transformers through the whole server, in several ways to compose steps."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.integration.test_equality import NEW_TOKENS, check, lengths_up_to, prompts_of, ways
from tests.transformers_models import CONTEXT_LENGTH, tiny_model


@pytest.mark.timeout(300)
@pytest.mark.parametrize("way", ways("chunks of 7, prefill first", "retracted at random"))
@pytest.mark.parametrize("family", ["cohere", "olmoe", "deepseek_v3"])
def test_models_without_a_native_file_give_the_tokens_of_transformers(
    family: str, way: str, tmp_path: Path
) -> None:
    directory = tiny_model(family, tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    prompts = prompts_of(lengths_up_to(CONTEXT_LENGTH - NEW_TOKENS), 512)
    flags = ["--model", str(directory), "--worker-threads", "1", "--page-size", "4"]
    check(model, prompts, tmp_path / "log", way, *flags)
