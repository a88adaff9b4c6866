"""Models of transformers through the whole server, in several ways to compose steps."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from quadriga.errors import ConfigError
from quadriga.server.config.engine_args import ModelArgs, WorkerArgs
from quadriga.server.models.resolve import resolve_model
from tests import EVERYTHING
from tests.integration.equality import (
    NEW_TOKENS,
    check,
    check_in_process,
    lengths_up_to,
    prompts_of,
    ways,
)
from tests.transformers_models import CONTEXT_LENGTH, tiny_model
from worker_proc.startup.build import check_ranks

FAMILIES = ["cohere", "olmoe", "deepseek_v3", "ministral"]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("family", "way"),
    [(family, way) for family in FAMILIES for way in ways("chunks of 7, prefill first")]
    + ([] if EVERYTHING else [("deepseek_v3", "retracted at random")]),
)
def test_models_without_a_native_file_give_the_tokens_of_transformers(
    family: str, way: str, tmp_path: Path
) -> None:
    directory = tiny_model(family, tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    prompts = prompts_of(lengths_up_to(CONTEXT_LENGTH - NEW_TOKENS), 512)
    flags = ["--worker-threads", "1", "--page-size", "4"]
    if EVERYTHING or family == "cohere":
        check(model, prompts, tmp_path / "log", way, "--model", str(directory), *flags)
    else:
        check_in_process(model, prompts, directory, way, *flags)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("family", ["nemotron", "glm4_moe"] if EVERYTHING else ["glm4_moe"])
def test_two_ranks_give_the_tokens_of_transformers(family: str, tmp_path: Path) -> None:
    directory = tiny_model(family, tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    prompts = prompts_of(lengths_up_to(CONTEXT_LENGTH - NEW_TOKENS, 8), 512)
    flags = ["--model", str(directory), "--worker-threads", "1", "--page-size", "4", "--tp", "2"]
    check(model, prompts, tmp_path / "log", "chunks of 7, prefill first", *flags)


@pytest.mark.parametrize(
    ("family", "tp", "words"),
    [
        ("nemotron", 3, "it must divide the model's 4 heads, 2 key and value heads"),
        ("olmoe", 2, "splits layers by colwise_gather_output"),
    ],
)
def test_a_model_that_cannot_be_split_is_refused(
    family: str, tp: int, words: str, tmp_path: Path
) -> None:
    files = resolve_model(ModelArgs(model=str(tiny_model(family, tmp_path / "model"))))
    with pytest.raises(ConfigError, match=f"tp is {tp}: .*{words}"):
        check_ranks(WorkerArgs(tp=tp, device="cpu"), files)
