"""Gemma 2 and Gemma 3 give the tokens and the log-probabilities of transformers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, Gemma3TextConfig

from quadriga.errors import ModelError
from quadriga.model_files.architectures import read_architecture
from quadriga.model_files.directory import read_config
from tests.tiny_models import LIKE_LLAMA, tiny_gemma2, tiny_gemma3, tiny_gemma3_text
from tests.unit.worker_driver import Driver, load_on_cpu, prompts_of, runner_of

NEW_TOKENS = 6
# Around the windows of the tiny models, which have 20 tokens.
LENGTHS = [1, 5, 19, 20, 21, 47, 110]


@pytest.fixture(scope="module", params=[name for name in LIKE_LLAMA if "gemma" in name])
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return LIKE_LLAMA[request.param](tmp_path_factory.mktemp("model"))


@torch.inference_mode()
def reference(model: Any, prompt: list[int]) -> list[int]:
    output = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return list(output[0, len(prompt) :].tolist())


@pytest.mark.parametrize("chunk", [7, 10**6])
@pytest.mark.parametrize("backend", ["torch", "native"])
def test_tokens_are_those_of_transformers(directory: Path, backend: str, chunk: int) -> None:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    prompts = prompts_of(LENGTHS)
    driver = Driver(runner_of(directory, attention_backend=backend))
    requests = [driver.add(prompt) for prompt in prompts]
    driver.generate(requests, NEW_TOKENS, chunk)
    for prompt, request in zip(prompts, requests, strict=True):
        assert request.output == reference(model, prompt), len(prompt)


@pytest.mark.parametrize("backend", ["torch", "native"])
def test_log_probabilities_are_those_of_transformers(
    directory: Path, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    runner = runner_of(directory, attention_backend=backend)
    seen: list[Tensor] = []
    compute = runner.engine.logits

    def keep(hidden: Tensor) -> Tensor:
        seen.append(compute(hidden).clone())
        return seen[-1]

    monkeypatch.setattr(runner.engine, "logits", keep)
    driver = Driver(runner)
    for prompt in prompts_of(LENGTHS):
        driver.step((driver.add(prompt, temperature=0.5, top_p=0.9), len(prompt)))
        with torch.inference_mode():
            expected = model(torch.tensor([prompt])).logits[0, -1]
        ours, theirs = seen[-1][-1].log_softmax(-1), expected.log_softmax(-1)
        assert (ours - theirs).abs().max() < 1e-3


def test_the_text_model_of_a_published_checkpoint_with_images_is_served(tmp_path: Path) -> None:
    """Its config.json leaves out defaults, and its tensors have older names."""
    tiny_gemma3(tmp_path)
    before = load_on_cpu(tmp_path).checkpoint_tensors()
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["text_config"].pop("model_type") == "gemma3_text"
    (tmp_path / "config.json").write_text(json.dumps(config))
    renamed = {
        f"language_model.{name.replace('language_model.', '')}" if "language_model" in name
        else name.removeprefix("model."): tensor
        for name, tensor in load_file(tmp_path / "model.safetensors").items()
    }  # fmt: skip
    assert {name.split(".")[0] for name in renamed} == {
        "language_model", "vision_tower", "multi_modal_projector",
    }  # fmt: skip
    save_file(renamed, tmp_path / "model.safetensors")
    after = load_on_cpu(tmp_path).checkpoint_tensors()
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


def test_defaults_of_a_nested_config_are_those_of_transformers(tmp_path: Path) -> None:
    text: dict[str, Any] = {
        "num_hidden_layers": 34,
        "hidden_size": 2560,
        "intermediate_size": 10240,
    }
    nested = {"model_type": "gemma3", "text_config": text, "vision_config": {"hidden_size": 1}}
    (tmp_path / "config.json").write_text(json.dumps(nested))
    ours, theirs = read_architecture(read_config(tmp_path)), Gemma3TextConfig(**text)
    assert ours.vocab_size == theirs.vocab_size
    assert (ours.num_heads, ours.num_kv_heads) == (8, 4)
    assert (ours.head_dim, ours.norm_eps) == (theirs.head_dim, theirs.rms_norm_eps)
    kinds = ["full_attention" if window is None else "sliding_attention" for window in ours.windows]
    assert kinds == theirs.layer_types
    assert ours.ropes[0] is not None
    assert ours.ropes[0].max_length == theirs.max_position_embeddings


def test_old_and_new_configs_describe_the_same_positions(tmp_path: Path) -> None:
    tiny_gemma3_text(tmp_path)
    new = json.loads((tmp_path / "config.json").read_text())
    old = {
        key: value for key, value in new.items() if key not in ("rope_parameters", "layer_types")
    }
    old |= {
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "rope_scaling": {"rope_type": "linear", "factor": 4.0},
        "sliding_window_pattern": 3,
    }
    ours, theirs = read_architecture(old), read_architecture(new)
    assert ours.windows == theirs.windows == (20, 20, None, 20)
    for one, other in zip(ours.ropes, theirs.ropes, strict=True):
        assert one is not None and other is not None
        assert one.kind == other.kind
        assert one.parameters["rope_theta"] == other.parameters["rope_theta"]
        assert one.parameters.get("factor") == other.parameters.get("factor")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"hidden_activation": "tanh"}, "hidden_activation = 'tanh'"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention = True"),
        ({"layer_types": ["full_attention"]}, "for each of the 4 layers"),
        ({"layer_types": ["chunked_attention"] * 4}, "supported: full_attention or"),
    ],
)
def test_what_is_not_computed_is_refused(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    config = json.loads((tiny_gemma2(tmp_path) / "config.json").read_text())
    with pytest.raises(ModelError, match=said):
        read_architecture(config | change)
