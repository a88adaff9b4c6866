"""Models of transformers over KV pages: the tokens of `generate`, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from quadriga.errors import ConfigError, ModelError
from quadriga.server.config.engine_args import ModelArgs
from quadriga.server.models.model_impl import ModelImpl, choose_model_impl
from quadriga.server.models.resolve import resolve_model
from tests.references import greedy_of
from tests.tiny_models import tiny_llama
from tests.transformers_models import CONTEXT_LENGTH, FAMILIES, tiny_model, transformers_runner
from tests.unit.worker_driver import Driver, failures_of_unknown_ids, prompts_of, runner_of
from worker_proc.step.inputs import make_inputs

NEW_TOKENS = 8


@pytest.mark.parametrize("family", FAMILIES)
def test_each_family_gives_the_tokens_of_transformers(family: str, tmp_path: Path) -> None:
    directory = tiny_model(family, tmp_path / "model")
    assert choose_model_impl(resolve_model(ModelArgs(model=str(directory)))) is (
        ModelImpl.TRANSFORMERS
    )
    prompts = prompts_of([1, 2, 5, 17, 40, CONTEXT_LENGTH - NEW_TOKENS])
    expected = greedy_of(directory, prompts, NEW_TOKENS)
    for chunk in (7, 10**6):
        driver = Driver(transformers_runner(directory, model_impl="auto"))
        requests = [driver.add(prompt) for prompt in prompts]
        driver.generate(requests, NEW_TOKENS, chunk)
        assert [request.output for request in requests] == expected


@pytest.mark.parametrize("family", ["cohere", "vaultgemma"])
def test_logits_of_all_tokens_have_the_scale_and_soft_cap_of_the_model(
    family: str, tmp_path: Path
) -> None:
    directory = tiny_model(family, tmp_path / "model")
    runner = transformers_runner(directory)
    driver = Driver(runner)
    (prompt,) = prompts_of([30])
    plan = driver.plan([(driver.add(prompt), len(prompt))])
    with torch.inference_mode():
        runner.table.apply(plan)
        hidden = runner.engine.forward(make_inputs(plan, runner.table))
        logits = runner.engine.logits(hidden)
        model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        expected = model(torch.tensor([prompt])).logits[0]
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def test_pages_that_another_request_filled_give_the_same_tokens(tmp_path: Path) -> None:
    directory = tiny_model("cohere", tmp_path / "model")
    runner = transformers_runner(directory)
    (prompt,) = prompts_of([30])
    driver = Driver(runner)
    first = driver.add(prompt)
    driver.generate([first], NEW_TOKENS)
    second = driver.add([*prompt[:20], 7, 8, 9], like=first, shared=20)
    driver.generate([second], NEW_TOKENS)
    assert second.output == greedy_of(directory, [second.prompt], NEW_TOKENS)[0]


def test_llama_gives_the_tokens_of_its_native_file(tmp_path: Path) -> None:
    directory = tiny_llama(tmp_path / "model")
    outputs = []
    for runner in (transformers_runner(directory), runner_of(directory)):
        driver = Driver(runner)
        requests = [driver.add(prompt) for prompt in prompts_of([1, 9, 33])]
        driver.generate(requests, NEW_TOKENS, chunk=7)
        outputs.append([request.output for request in requests])
    assert outputs[0] == outputs[1]


def test_bfloat16_weights_of_linear_layers_are_packed_once(tmp_path: Path) -> None:
    directory = tiny_model("cohere", tmp_path / "model")
    runner = transformers_runner(directory, dtype="bfloat16")
    driver = Driver(runner)
    request = driver.add(prompts_of([20])[0])
    driver.generate([request], NEW_TOKENS)
    assert len(request.output) == NEW_TOKENS


def test_random_weights_need_no_checkpoint(tmp_path: Path) -> None:
    directory = tiny_model("stablelm", tmp_path / "model")
    (directory / "model.safetensors").unlink()
    outputs = []
    for _ in range(2):
        driver = Driver(transformers_runner(directory, load_format="dummy"))
        request = driver.add(prompts_of([20])[0])
        driver.generate([request], NEW_TOKENS)
        outputs.append(request.output)
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize(
    ("kind", "changes", "words"),
    [
        ("lfm2", {"layer_types": ["conv", "full_attention"]}, "layer 0 depends on other tokens"),
        (
            "minimax",
            {"layer_types": ["full_attention", "linear_attention"], "num_local_experts": 4},
            "the hidden state depends on other tokens",
        ),
        ("bert", {}, "causal language models only"),
        ("deepseek_v32", {}, "without masks and cache fails"),
    ],
)
def test_a_model_that_pages_cannot_serve_is_refused_at_the_start(
    kind: str, changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    directory = tiny_model(kind, tmp_path / "model", **changes)
    with pytest.raises(ModelError, match=words) as refused:
        transformers_runner(directory)
    assert "\n" not in str(refused.value)
    assert str(directory) in str(refused.value)


def test_missing_tensors_are_named(tmp_path: Path) -> None:
    directory = tiny_model("nemotron", tmp_path / "model")
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"num_hidden_layers": 3}))
    with pytest.raises(ModelError, match=r"lacks \d+ tensors: model.layers.2"):
        transformers_runner(directory)


@pytest.mark.parametrize(("context", "long"), [(96, True), (48, False)])
def test_longrope_uses_one_list_of_factors_in_every_step(
    context: int, long: bool, tmp_path: Path
) -> None:
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 48,
            "short_factor": [1.0] * 8, "long_factor": [1.0 + i for i in range(8)]}  # fmt: skip
    directory = tiny_llama(
        tmp_path / "model", rope_parameters=rope, max_position_embeddings=96, head_dim=16
    )
    outputs = []
    for runner in (
        transformers_runner(directory, context_length=context),
        runner_of(directory, context_length=context),
    ):
        driver = Driver(runner)
        requests = [driver.add(prompt) for prompt in prompts_of([1, 9, 33])]
        driver.generate(requests, NEW_TOKENS, chunk=7)
        outputs.append([request.output for request in requests])
    assert outputs[0] == outputs[1]
    assert (outputs[0] == greedy_of(directory, prompts_of([1, 9, 33]), NEW_TOKENS)) != long


@pytest.mark.parametrize(
    ("flag", "value"),
    [("attention_backend", "native"), ("quantization", "int8"), ("kv_cache_dtype", "int8")],
)
def test_flags_of_native_files_are_refused(flag: str, value: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"--{flag.replace('_', '-')} {value} needs a native"):
        transformers_runner(tiny_llama(tmp_path / "model"), **{flag: value})


CODE = """
from transformers import LlamaConfig, LlamaForCausalLM


class AcornConfig(LlamaConfig):
    model_type = "acorn"


class AcornForCausalLM(LlamaForCausalLM):
    config_class = AcornConfig
"""


def test_code_of_a_repository_runs_with_the_flag_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "modules"
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(cache))
    monkeypatch.syspath_prepend(str(cache))
    directory = tiny_llama(tmp_path / "model")
    expected = greedy_of(directory, prompts_of([9]), NEW_TOKENS)
    (directory / "modeling_acorn.py").write_text(CODE)
    file = directory / "config.json"
    auto_map = {"AutoConfig": "modeling_acorn.AcornConfig",
                "AutoModelForCausalLM": "modeling_acorn.AcornForCausalLM"}  # fmt: skip
    changes = {"model_type": "acorn", "architectures": ["AcornForCausalLM"], "auto_map": auto_map}
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(ModelError, match="--trust-remote-code"):
        transformers_runner(directory)
    driver = Driver(transformers_runner(directory, trust_remote_code=True))
    request = driver.add(prompts_of([9])[0])
    driver.generate([request], NEW_TOKENS)
    assert request.output == expected[0]


def test_a_request_with_ids_that_the_model_does_not_have_fails_alone(llama_dir: Path) -> None:
    runner = transformers_runner(llama_dir, max_running_requests=10)
    assert len(failures_of_unknown_ids(runner)) == 8
