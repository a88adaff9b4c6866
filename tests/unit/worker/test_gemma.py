"""Gemma 2 and Gemma 3 give the tokens and the log-probabilities of transformers."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Gemma3TextConfig

from quadriga.errors import ModelError
from quadriga.server.config.engine_args import ModelArgs
from quadriga.server.models.families.llama import gemma2, gemma3
from quadriga.server.models.formats.directory import read_config
from quadriga.server.models.resolve import resolve_model
from tests.references import greedy_of
from tests.tiny_models import GEMMA, tiny_gemma2, tiny_gemma3, tiny_gemma3_with_images
from tests.unit.worker_driver import Driver, load_on_cpu, prompts_of, runner_of
from worker_proc.models.attention import Ints

FAMILIES: dict[str, Callable[[Path], Path]] = {
    **GEMMA,
    "gemma3": tiny_gemma3_with_images,
    "gemma2 with biases": lambda path: tiny_gemma2(path, attention_bias=True),
}
NEW_TOKENS = 6
# Around the windows of the tiny models, which have 20 tokens.
LENGTHS = [1, 5, 19, 20, 21, 47, 110]


@pytest.fixture(scope="module", params=list(FAMILIES))
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return FAMILIES[request.param](tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("chunk", [7, 10**6])
@pytest.mark.parametrize("backend", ["torch", "native"])
def test_tokens_are_those_of_transformers(directory: Path, backend: str, chunk: int) -> None:
    prompts = prompts_of(LENGTHS)
    driver = Driver(runner_of(directory, attention_backend=backend))
    requests = [driver.add(prompt) for prompt in prompts]
    driver.generate(requests, NEW_TOKENS, chunk)
    expected = greedy_of(directory, prompts, NEW_TOKENS)
    assert [request.output for request in requests] == expected


@pytest.mark.parametrize("backend", ["torch", "native"])
def test_log_probabilities_are_those_of_transformers(
    directory: Path, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    runner = runner_of(directory, attention_backend=backend)
    seen: list[Tensor] = []
    compute = runner.engine.logits

    def keep(hidden: Tensor, adapters: Ints | None = None) -> Tensor:
        seen.append(compute(hidden, adapters).clone())
        return seen[-1]

    monkeypatch.setattr(runner.engine, "logits", keep)
    driver = Driver(runner)
    for prompt in prompts_of(LENGTHS):
        driver.step((driver.add(prompt, temperature=0.5, top_p=0.9), len(prompt)))
        with torch.inference_mode():
            expected = model(torch.tensor([prompt])).logits[0, -1]
        ours, theirs = seen[-1][-1].log_softmax(-1), expected.log_softmax(-1)
        assert (ours - theirs).abs().max() < 1e-3


def test_the_text_model_of_a_checkpoint_with_images_is_served(tmp_path: Path) -> None:
    """Its config.json is nested and leaves out defaults, and its tensors have other names."""
    from safetensors.torch import load_file, save_file

    tiny_gemma3(tmp_path, num_attention_heads=8, num_key_value_heads=4)
    before = load_on_cpu(tmp_path).checkpoint_tensors()
    config = json.loads((tmp_path / "config.json").read_text())
    for key in ("num_attention_heads", "num_key_value_heads", "architectures", "dtype"):
        del config[key]
    nested = {
        "model_type": "gemma3",
        "architectures": ["Gemma3ForConditionalGeneration"],
        "text_config": config,
        "vision_config": {"hidden_size": 1},
    }
    (tmp_path / "config.json").write_text(json.dumps(nested))
    weights = load_file(tmp_path / "model.safetensors")
    renamed = {f"language_model.{name}": tensor for name, tensor in weights.items()}
    renamed["vision_tower.x.weight"] = torch.zeros(1)
    renamed["multi_modal_projector.y.weight"] = torch.zeros(1)
    save_file(renamed, tmp_path / "model.safetensors")
    model = load_on_cpu(tmp_path)
    after = model.checkpoint_tensors()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert resolve_model(ModelArgs(str(tmp_path))).vocab_size == 512


def test_defaults_of_a_nested_config_are_those_of_transformers(tmp_path: Path) -> None:
    text: dict[str, Any] = {"num_hidden_layers": 34, "hidden_size": 2560}
    text["intermediate_size"] = 10240
    nested = {"model_type": "gemma3", "text_config": text, "vision_config": {"hidden_size": 1}}
    (tmp_path / "config.json").write_text(json.dumps(nested))
    ours, theirs = gemma3(read_config(tmp_path)), Gemma3TextConfig(**text)
    assert ours.vocab_size == theirs.vocab_size
    assert (ours.num_heads, ours.num_kv_heads) == (8, 4)
    assert (ours.head_dim, ours.norm_eps) == (theirs.head_dim, theirs.rms_norm_eps)
    kinds = ["full_attention" if window is None else "sliding_attention" for window in ours.windows]
    assert kinds == theirs.layer_types
    whole = ours.ropes[5]
    assert whole is not None
    assert (whole.max_length, whole.parameters["rope_theta"]) == (131072, 1e6)


def test_names_of_tensors_of_new_checkpoints_with_images(tmp_path: Path) -> None:
    model, tensor = load_on_cpu(tiny_gemma3(tmp_path)), torch.zeros(1)
    for stored, names in (
        ("model.language_model.norm.weight", ["model.norm.weight"]),
        ("model.vision_tower.x.weight", []),
        ("language_model.lm_head.weight", []),
    ):
        assert [name for name, _ in model.checkpoint_parts(stored, tensor)] == names


def test_old_and_new_configs_describe_the_same_positions(tmp_path: Path) -> None:
    tiny_gemma3(tmp_path)
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
    ours, theirs = gemma3(old), gemma3(new)
    assert ours.windows == theirs.windows == (20, 20, None, 20)
    for one, other in zip(ours.ropes, theirs.ropes, strict=True):
        assert one is not None
        assert other is not None
        assert one.kind == other.kind
        assert one.parameters["rope_theta"] == other.parameters["rope_theta"]
        assert one.parameters.get("factor") == other.parameters.get("factor")
    assert ours.ropes[2] is not None
    assert ours.ropes[2].parameters["factor"] == 4.0


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"hidden_activation": "mish"}, "hidden_activation = 'mish'"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention = True"),
        ({"layer_types": ["full_attention"]}, "for each of the 4 layers"),
        ({"layer_types": ["chunked_attention"] * 4}, "supported: full_attention or"),
    ],
)
def test_what_is_not_computed_is_refused(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    config = json.loads((tiny_gemma2(tmp_path) / "config.json").read_text())
    with pytest.raises(ModelError, match=said):
        gemma2(config | change)
