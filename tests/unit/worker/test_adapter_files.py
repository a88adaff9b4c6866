"""Formats of adapters and of their bases, and one line for each mistake in an adapter's files."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from quadriga.errors import ModelError
from quadriga.server.config.server_config import ServerConfig
from quadriga.server.models.adapters.content import read_content
from quadriga.server.models.resolve import resolve_model
from tests.adapted_runs import (
    COUNT,
    check_adapted,
    check_answer,
    files_of,
    run_adapted,
    torch_runner,
)
from tests.gguf_adapters import gguf_adapter
from tests.tiny_adapters import make_adapter
from tests.tiny_experts import EXPERTS, tiny_mxfp4
from tests.tiny_models import FAMILIES, tiny_llama
from tests.unit.gguf_checkpoint import gguf_of
from tests.unit.quantized_checkpoint import FORMATS, quantize_checkpoint
from tests.unit.worker_driver import load_on_cpu, prompts_of
from worker_proc.adapters.places import Places
from worker_proc.loading.loader import load_model
from worker_proc.startup.adapters import read_adapter
from worker_proc.startup.build import make_runner

pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore")  # PEFT's advice for training

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
Q_PROJ = "base_model.model.model.layers.1.self_attn.q_proj"


@pytest.mark.parametrize("family", ["llama", "gpt2", "phi3", "gemma2", "starcoder2"])
def test_an_adapter_in_a_gguf_gives_the_answers_of_peft(family: str, tmp_path: Path) -> None:
    directory = FAMILIES[family](tmp_path / "model")
    adapter = make_adapter(directory, tmp_path / "adapter")
    file = gguf_adapter(directory, adapter, tmp_path / "adapter.gguf")
    runner = torch_runner(files_of(directory), [file])
    check_adapted(runner, directory, [adapter])


def test_an_adapter_in_a_gguf_beside_a_base_in_one(tmp_path: Path) -> None:
    directory = tiny_llama(tmp_path / "model")
    adapter = make_adapter(directory, tmp_path / "adapter")
    file = gguf_adapter(directory, adapter, tmp_path / "adapter.gguf")
    base = gguf_of(directory, lambda _: GGMLQuantizationType.F32)
    check_adapted(torch_runner(base, [file, adapter]), directory, [adapter, adapter])


def test_dora_beside_a_gguf_in_8_bits(tmp_path: Path) -> None:
    """The row norms of W + U D are those of the dequantized weights."""
    directory = tiny_llama(tmp_path / "model")
    base = gguf_of(directory)
    tensors = load_model(base, torch.float32, torch.device("cpu")).checkpoint_tensors()
    save_file({name: t.clone() for name, t in tensors.items()}, directory / "model.safetensors")
    adapter = make_adapter(directory, tmp_path / "adapter", use_dora=True)
    check_adapted(torch_runner(base, [adapter]), directory, [adapter])


@pytest.mark.parametrize("name", ["gptq 4 bits", "awq"])
def test_dora_and_a_saved_head_beside_a_quantized_base(name: str, tmp_path: Path) -> None:
    dense, quantized = (tiny_llama(tmp_path / part, tie=False) for part in ("dense", "quantized"))
    save_file(quantize_checkpoint(quantized, *FORMATS[name]), dense / "model.safetensors")
    saved = ["lm_head"]
    adapter = make_adapter(dense, tmp_path / "adapter", use_dora=True, modules_to_save=saved)
    check_adapted(torch_runner(files_of(quantized), [adapter]), dense, [adapter])


def test_an_adapter_of_a_pickle_has_the_numbers_of_safetensors(tmp_path: Path) -> None:
    directory = tiny_llama(tmp_path / "model")
    adapter = make_adapter(directory, tmp_path / "adapter")
    tensors = load_file(adapter / WEIGHTS)
    torch.save(tensors, adapter / "adapter_model.bin")
    (adapter / WEIGHTS).unlink()
    runner = torch_runner(files_of(directory), [adapter])
    save_file(tensors, adapter / WEIGHTS)
    check_adapted(runner, directory, [adapter])


@pytest.mark.parametrize(
    ("family", "targets"),
    [("mixtral", ["w1", "w2", "w3"]), ("qwen3_moe", ["gate_proj", "up_proj", "down_proj"])],
)
def test_experts_that_are_named_one_by_one(family: str, targets: list[str], tmp_path: Path) -> None:
    """As PEFT wrote them before transformers 5, whose modules have no such names any more."""
    directory = EXPERTS[family](tmp_path / "model")
    merged = EXPERTS[family](tmp_path / "merged")
    weights, draw = load_file(directory / "model.safetensors"), torch.Generator().manual_seed(1)
    tensors: dict[str, torch.Tensor] = {}
    for name in [name for name in weights if name.split(".")[-2] in targets]:
        outputs, inputs = weights[name].shape
        down = torch.randn(4, inputs, generator=draw) * 0.1
        up = torch.randn(outputs, 4, generator=draw) * 0.2
        weights[name] = weights[name] + 2 * up @ down
        module = f"base_model.model.{name.removesuffix('.weight')}"
        tensors |= {f"{module}.lora_A.weight": down, f"{module}.lora_B.weight": up}
    assert any(".experts." in name for name in tensors)
    save_file(weights, merged / "model.safetensors", {"format": "pt"})
    (tmp_path / "adapter").mkdir()
    save_file(tensors, tmp_path / "adapter" / WEIGHTS)
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": targets}
    (tmp_path / "adapter" / CONFIG).write_text(json.dumps(config))
    requests = [(prompt, 0) for prompt in prompts_of([5, 30])]
    runner = torch_runner(files_of(directory), [tmp_path / "adapter"])
    answers = run_adapted(runner, requests, COUNT)
    model = AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32).eval()
    for (prompt, _), answer in zip(requests, answers, strict=True):
        check_answer(model, prompt, answer)


def test_dora_beside_experts_in_mxfp4(tmp_path: Path) -> None:
    decoded, stored = tiny_mxfp4(tmp_path)
    adapter = make_adapter(decoded, tmp_path / "adapter", use_dora=True)
    check_adapted(torch_runner(files_of(stored), [adapter]), decoded, [adapter])


# --- mistakes ---


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("model"))


@pytest.fixture
def adapter(model_dir: Path, tmp_path: Path) -> Path:
    return make_adapter(model_dir, tmp_path / "adapter", target_modules=["q_proj", "down_proj"])


def refusal(model_dir: Path, adapter: Path, max_rank: int | None = None) -> str:
    """Return the error of an adapter, which is one line that names it."""

    def read() -> None:
        places = Places.of(load_on_cpu(model_dir))
        read_adapter(read_content(adapter), places, files_of(model_dir), max_rank)

    with pytest.raises(ModelError) as raised:
        read()
    message = str(raised.value)
    assert "\n" not in message
    assert str(adapter) in message
    return message


def change_config(adapter: Path, **changes: Any) -> None:
    config = json.loads((adapter / CONFIG).read_text())
    (adapter / CONFIG).write_text(json.dumps(config | changes))


def change_tensors(adapter: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(adapter / WEIGHTS)
    change(tensors)
    save_file(tensors, adapter / WEIGHTS)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"peft_type": "IA3"}, "has peft_type 'IA3'; supported: 'LORA'"),
        ({"r": 0}, "has r = 0; it must be a whole number from 1 to 1000000"),
        ({"lora_alpha": None}, "has lora_alpha = None; it must be a number"),
        ({"rank_pattern": {"q_proj": "x"}}, "rank_pattern['q_proj'] = 'x'; it must be a whole"),
        ({"rank_pattern": {"q_(proj": 4}}, "cannot be used"),
        ({"use_qalora": True}, "has use_qalora, which is not supported"),
        ({"trainable_token_indices": "x"}, "= 'x'; it must be a list of token ids, or one for"),
        ({"init_lora_weights": "pissa"}, "changes the base's weights: save it with"),
        ({"r": 5}, "has rank 4, and its config says 5: adapter_config.json is of another adapter"),
        ({"target_modules": ["q_proj", "v_proj"]},
         "names model.layers.0.self_attn.v_proj in target_modules, and it has no tensors of it"),
        ({"use_dora": True}, "has no lora_magnitude_vector, and its config says use_dora = True"),
        ({"layers_to_transform": "x"}, "layers_to_transform = 'x'; it must be a number of a layer"),
    ],
)  # fmt: skip
def test_a_wrong_config_is_refused_in_one_line(
    changes: dict[str, Any], message: str, model_dir: Path, adapter: Path
) -> None:
    change_config(adapter, **changes)
    assert message in refusal(model_dir, adapter)


def put(name: str, value: torch.Tensor) -> Callable[[dict[str, torch.Tensor]], None]:
    return lambda tensors: tensors.update({name: value})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (put("base_model.model.model.layers.9.self_attn.q_proj.lora_A.weight", torch.ones(4, 96)),
         "1 tensors that match nothing that can be changed here: base_model.model.model.layers.9"),
        (put(f"{Q_PROJ}.lora_C.weight", torch.ones(4)), "match nothing"),
        (put("base_model.model.model.norm.weight", torch.ones(96)), "match nothing"),
        (put("base_model.model.model.embed_tokens.weight", torch.ones(600, 96)),
         "embed_tokens.weight is [600, 96], and the model needs [512, 96]"),
        (put(f"{Q_PROJ}.lora_A.weight", torch.ones(4, 64)),
         "q_proj.lora_A.weight is [4, 64], and the model needs [4, 96]"),
        (put(f"{Q_PROJ}.lora_B.weight", torch.ones(97, 4)),
         "q_proj.lora_B.weight is [97, 4], and the model needs [96, 4]"),
        (put(f"{Q_PROJ}.lora_B.weight", torch.full((96, 4), torch.nan)), "NaN or infinite"),
        (put(f"{Q_PROJ}.lora_magnitude_vector", torch.ones(96)), "says use_dora = False"),
        (put(f"{Q_PROJ}.lora_B.weight", torch.full((96, 4), 3e38)), "overflow in float32"),
        (lambda tensors: tensors.clear(), "it has no tensors"),
        (lambda tensors: tensors.pop(f"{Q_PROJ}.lora_B.weight"),
         "has lora_A.weight, but not the other one"),
    ],
)  # fmt: skip
def test_a_wrong_tensor_is_refused_in_one_line(
    change: Callable[[dict[str, torch.Tensor]], None], message: str, model_dir: Path, adapter: Path
) -> None:
    change_tensors(adapter, change)
    assert message in refusal(model_dir, adapter)


def test_a_damaged_file_is_refused_in_one_line(model_dir: Path, adapter: Path) -> None:
    whole = (adapter / WEIGHTS).read_bytes()
    (adapter / WEIGHTS).write_bytes(whole[:-10])
    assert "is cut short" in refusal(model_dir, adapter)
    (adapter / WEIGHTS).write_bytes(whole[:5])
    assert "is cut short: it has 5 bytes" in refusal(model_dir, adapter)
    (adapter / WEIGHTS).write_bytes(b"x" * 1000)
    assert "no safetensors file" in refusal(model_dir, adapter)
    (adapter / WEIGHTS).unlink()
    assert "neither adapter_model.safetensors nor adapter_model.bin" in refusal(model_dir, adapter)
    (adapter / "adapter_model.bin").write_bytes(b"not a pickle")
    assert "adapter_model.bin is damaged, or has more than tensors" in refusal(model_dir, adapter)
    torch.save({"a": adapter}, adapter / "adapter_model.bin")
    assert "adapter_model.bin is damaged, or has more than tensors" in refusal(model_dir, adapter)
    (adapter / CONFIG).write_text("{")
    assert "its adapter_config.json is no JSON" in refusal(model_dir, adapter)
    (adapter / CONFIG).unlink()
    assert "has no adapter_config.json" in refusal(model_dir, adapter)
    assert "no such file or directory" in refusal(model_dir, adapter / "other")


def test_a_rank_above_the_limit_is_refused(model_dir: Path, adapter: Path) -> None:
    message = "it has rank 4, and --max-lora-rank is 3: start the server with a larger one"
    assert message in refusal(model_dir, adapter, max_rank=3)


def test_an_adapter_of_another_base_names_both(model_dir: Path, tmp_path: Path) -> None:
    other = tiny_llama(tmp_path / "other", hidden_size=48, num_attention_heads=3)
    adapter = make_adapter(other, tmp_path / "adapter")
    message = refusal(model_dir, adapter)
    assert f"names the base {other}, which has model_type llama, hidden_size 48" in message
    assert "has model_type llama, hidden_size 96" in message
    change_config(adapter, base_model_name_or_path="org/model")
    message = refusal(model_dir, adapter)
    assert "and the model needs" in message
    assert "its base_model_name_or_path is 'org/model'" in message


def test_an_adapter_names_a_base_of_equal_sizes(model_dir: Path, adapter: Path) -> None:
    change_config(adapter, base_model_name_or_path="org/model")
    places = Places.of(load_on_cpu(model_dir))
    assert read_adapter(read_content(adapter), places, files_of(model_dir)).changes


def test_dora_beside_random_weights_is_refused(model_dir: Path, tmp_path: Path) -> None:
    adapter = make_adapter(model_dir, tmp_path / "adapter", use_dora=True)
    files = replace(files_of(model_dir), weights=None)
    with pytest.raises(ModelError, match="are random: start without --load-format dummy"):
        read_adapter(read_content(adapter), Places.of(load_on_cpu(model_dir)), files)


def test_a_matrix_that_changes_in_two_ways_is_refused(model_dir: Path, tmp_path: Path) -> None:
    adapter = make_adapter(model_dir, tmp_path / "adapter", target_modules=["lm_head"])
    change_config(adapter, trainable_token_indices=[1])
    name = "base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta"
    change_tensors(adapter, put(name, torch.ones(1, 96)))
    assert "it changes model.embed_tokens in two ways" in refusal(model_dir, adapter)


def test_a_part_that_texts_do_not_need_is_left_out_with_a_line_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = FAMILIES["gemma3_text"](tmp_path / "model")
    adapter = make_adapter(directory, tmp_path / "adapter")
    image = "base_model.model.model.vision_tower.encoder.layers.0.self_attn.q_proj.lora_{}.weight"
    change_tensors(adapter, put(image.format("A"), torch.ones(4, 16)))
    change_tensors(adapter, put(image.format("B"), torch.ones(16, 4)))
    places = Places.of(load_on_cpu(directory))
    assert read_adapter(read_content(adapter), places, files_of(directory)).changes
    assert "an adapter changes 1 modules that texts do not need" in caplog.text


def test_trained_norms_are_refused(tmp_path: Path) -> None:
    directory = FAMILIES["gpt2"](tmp_path / "model")
    adapter = make_adapter(directory, tmp_path / "adapter", bias="all")
    assert "ln_1.bias is of a norm, and trained (bias = 'all')" in refusal(directory, adapter)


def test_a_gguf_that_is_no_adapter_of_the_model_is_refused(
    model_dir: Path, adapter: Path, tmp_path: Path
) -> None:
    other = gguf_adapter(model_dir, adapter, tmp_path / "other.gguf", architecture="qwen2")
    assert "is for the architecture 'qwen2', and the model is 'llama'" in refusal(model_dir, other)
    assert read_content(other).header is not None
    wide = tiny_llama(tmp_path / "wide", hidden_size=192, head_dim=16)
    file = gguf_adapter(wide, make_adapter(wide, tmp_path / "of-wide"), tmp_path / "wide.gguf")
    assert "it was trained on another model" in refusal(model_dir, file)
    model = gguf_of(wide)
    assert model.weights is not None
    assert "is a GGUF of type 'model', and no adapter" in refusal(model_dir, model.weights)


def test_an_engine_without_adapters_says_what_has_them(model_dir: Path) -> None:
    flags = ServerConfig().replace(
        model=str(model_dir), model_impl="transformers", device="cpu", dtype="float32",
        max_total_tokens=256,
    )  # fmt: skip
    runner = make_runner(flags, resolve_model(flags.model))
    assert not runner.engine.supports_adapters
    with pytest.raises(ModelError, match="computes no adapters: start without them, or with"):
        runner.engine.set_adapter(0, None)
