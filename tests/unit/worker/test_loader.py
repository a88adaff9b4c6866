"""Checkpoints are loaded completely, and errors name the tensor or the setting."""

import json
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from quadriga.errors import ModelError
from quadriga.server.config.engine_args import ModelArgs
from quadriga.server.config.server_config import ServerConfig
from quadriga.server.models.resolve import ModelFiles, resolve_model
from quadriga.wire.packing import pack_ids
from quadriga.wire.worker import NewSlot
from tests.tiny_models import (
    tiny_gemma,
    tiny_gemma2,
    tiny_gemma3,
    tiny_glm,
    tiny_gpt2,
    tiny_gpt_neox,
    tiny_granite,
    tiny_llama,
    tiny_mistral,
    tiny_olmo2,
    tiny_phi3,
    tiny_qwen2,
    tiny_qwen3,
    tiny_smollm3,
    tiny_starcoder2,
)
from tests.unit.gguf_checkpoint import gguf_of
from tests.unit.worker_driver import Driver, load_on_cpu, prompts_of, runner_of
from worker_proc.loading.loader import load_model
from worker_proc.loading.sharding import TPRank
from worker_proc.models.layers import Attention
from worker_proc.startup.build import log_rounding
from worker_proc.step.runner import Runner
from worker_proc.step.slot_table import SlotTable

CPU = torch.device("cpu")


def generated(runner: Runner) -> list[list[int]]:
    driver = Driver(runner)
    requests = [driver.add(prompt) for prompt in prompts_of([3, 11, 30])]
    driver.generate(requests, 10)
    return [request.output for request in requests]


def change_config(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(
    ("build", "name", "tensor", "message"),
    [
        (tiny_llama, "model.layers.1.self_attn.k_proj.weight", None, "lacks 1 tensors: {}"),
        (tiny_llama, "model.layers.0.self_attn.q_norm.weight", torch.ones(16),
         "unexpected 1 tensors: {}"),
        (tiny_gpt2, "transformer.ln_f.bias", torch.ones(47), r"{} is \[47\].*\[48\]"),
    ],
)  # fmt: skip
def test_a_tensor_that_is_missing_unexpected_or_of_another_shape_is_named(
    build: Callable[[Path], Path], name: str, tensor: torch.Tensor | None, message: str,
    tmp_path: Path,
) -> None:  # fmt: skip
    file = build(tmp_path) / "model.safetensors"
    tensors = {**load_file(file), name: tensor}
    save_file({name: t for name, t in tensors.items() if t is not None}, file)
    with pytest.raises(ModelError, match=message.format(re.escape(name))):
        load_on_cpu(tmp_path)


def test_constants_and_tied_copies_in_old_checkpoints_are_passed_over(tmp_path: Path) -> None:
    expected = generated(runner_of(tiny_gpt2(tmp_path)))
    tensors = load_file(tmp_path / "model.safetensors")
    old = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    old["h.0.attn.bias"] = torch.ones(1, 1, 128, 128)
    old["lm_head.weight"] = old["wte.weight"].clone()
    save_file(old, tmp_path / "model.safetensors")
    assert generated(runner_of(tmp_path)) == expected


def test_sharded_weights_load_like_one_file(tmp_path: Path) -> None:
    directory = tiny_llama(tmp_path, tie=False)
    expected = generated(runner_of(directory))
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    (directory / "model.safetensors").unlink()
    model.save_pretrained(directory, max_shard_size="200KB")
    assert len(list(directory.glob("*.safetensors"))) > 1
    assert generated(runner_of(directory)) == expected


def test_a_lost_shard_is_named(tmp_path: Path) -> None:
    directory = tiny_llama(tmp_path, tie=False)
    files = resolve_model(ModelArgs(model=str(directory)))
    weight_map = {"weight_map": {"lm_head.weight": "model-00001-of-00001.safetensors"}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(weight_map))
    with pytest.raises(ModelError, match=r"lacks model-00001-of-00001\.safetensors"):
        load_model(files, torch.float32, CPU)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model_type": "mamba", "architectures": ["MambaForCausalLM"]},
            "mamba, MambaForCausalLM.*supported: .*gemma3",
        ),
        ({"hidden_act": "mish"}, "hidden_act = 'mish'; supported: silu, swish"),
        ({"rope_parameters": {"rope_type": "su"}}, "rope_type = 'su'; supported: default, linear"),
        ({"rope_parameters": {"rope_type": "linear"}}, "no 'factor'"),
        ({"num_key_value_heads": 5}, "num_attention_heads = 6, which is no multiple of"),
        ({"num_attention_heads": None}, "no 'num_attention_heads'"),
    ],
)
def test_a_config_beyond_what_the_model_does_is_refused(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    tiny_llama(tmp_path)
    change_config(tmp_path, **changes)
    with pytest.raises(ModelError, match=message):
        load_on_cpu(tmp_path)


def dummy_files(directory: Path) -> ModelFiles:
    return resolve_model(ModelArgs(model=str(directory), load_format="dummy"))


def test_dummy_weights_are_the_same_each_time_and_differ_between_layers(tmp_path: Path) -> None:
    files = dummy_files(tiny_llama(tmp_path))
    first_load, second_load = (load_model(files, torch.float32, CPU).state_dict() for _ in range(2))
    assert all(torch.equal(first_load[name], second_load[name]) for name in first_load)
    first, second = (first_load[f"blocks.{layer}.mlp.down_proj.weight"] for layer in (0, 1))
    assert not torch.equal(first, second)
    assert abs(float(first.std()) - 0.02) < 0.002
    assert bool((first_load["final_norm.weight"] == 1).all())


@pytest.mark.parametrize(
    "build",
    [
        tiny_gpt2,
        lambda path: tiny_llama(path, tie=False),
        tiny_qwen2,
        tiny_qwen3,
        tiny_gemma,
        tiny_gemma2,
        tiny_gemma3,
        tiny_phi3,
        tiny_starcoder2,
        tiny_granite,
        tiny_olmo2,
        tiny_smollm3,
    ],
)
def test_a_gguf_holds_the_weights_of_the_checkpoint_it_was_made_from(
    build: Callable[[Path], Path], tmp_path: Path
) -> None:
    directory = build(tmp_path / "hf")
    loaded = load_model(gguf_of(directory), torch.float32, CPU).state_dict()
    for name, expected in load_on_cpu(directory).state_dict().items():
        assert (loaded[name] - expected).abs().max() < 0.004, name


@pytest.mark.parametrize("build", [tiny_glm, tiny_gpt_neox, tiny_phi3])
def test_two_ranks_have_the_rows_of_one_process(
    build: Callable[[Path], Path], tmp_path: Path
) -> None:
    directory = build(tmp_path)
    whole = load_on_cpu(directory).checkpoint_tensors()
    files = resolve_model(ModelArgs(model=str(directory)))
    ranks = [load_model(files, torch.float32, CPU, rank=TPRank(rank, 2)) for rank in range(2)]
    halves = [model.checkpoint_tensors() for model in ranks]
    split = [name for name, tensor in whole.items() if len(halves[0][name]) < len(tensor)]
    assert len(split) >= 3 * 3  # queries, keys and values of each layer
    for name in split:
        assert torch.equal(torch.cat([half[name] for half in halves]), whole[name]), name


def test_a_gguf_of_another_architecture_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "tiny.gguf"
    file.write_bytes(b"GGUF")
    (tmp_path / "tiny.json").write_text("{}")
    directory = tiny_gpt2(tmp_path / "hf")
    config = {**json.loads((directory / "config.json").read_text()), "model_type": "mamba"}
    files = ModelFiles("tiny", str(file), config, {}, directory, file, tmp_path / "tiny.json")
    with pytest.raises(ModelError, match="a GGUF of mamba; supported: gemma, gemma2, gemma3, gpt2"):
        load_model(files, torch.float32, CPU)


def test_a_window_is_that_of_config_json_where_it_is_shorter_than_the_context(
    tmp_path: Path,
) -> None:
    tiny_mistral(tmp_path, sliding_window=64)
    assert load_on_cpu(tmp_path).window == 64
    files = resolve_model(ModelArgs(model=str(tmp_path), context_length=64))
    assert load_model(files, torch.float32, CPU).window == 0


def test_a_model_of_which_a_layer_sees_all_has_no_window(tmp_path: Path) -> None:
    tiny_qwen2(tmp_path, sliding_window=64, use_sliding_window=True, max_window_layers=1)
    model = load_on_cpu(tmp_path)
    windows = [m.window for m in model.modules() if isinstance(m, Attention)]
    assert (windows, model.window) == ([None, 64, 64], 0)


@pytest.mark.parametrize(
    ("stored", "asked", "says"),
    [("float16", "auto", 1), ("float16", "bfloat16", 0), ("bfloat16", "auto", 0)],
)
def test_a_float16_model_that_is_rounded_is_said(
    stored: str, asked: str, says: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tiny_llama(tmp_path)
    change_config(tmp_path, dtype=stored)
    files = resolve_model(ModelArgs(model=str(tmp_path)))
    with caplog.at_level(logging.INFO):
        log_rounding(ServerConfig().replace(dtype=asked), files, torch.bfloat16)
    assert caplog.text.count("float16 in the files, rounded to bfloat16") == says


@pytest.mark.parametrize(
    ("known", "computed", "pages"),
    [(3, 3, [0]), (0, 0, [0]), (33, 0, [0, 1, 2]), (5, 4, [0]), (4, 0, [8]), (4, 0, [-1])],
)
def test_a_slot_that_does_not_add_up_is_refused(
    known: int, computed: int, pages: list[int]
) -> None:
    table = SlotTable(num_slots=2, context_length=32, num_pages=8, page_size=4, device=CPU)
    new = NewSlot(0, pack_ids(range(known)), computed, pack_ids(pages), 0.0, -1, 1.0, 0)
    with pytest.raises(ValueError, match="slot 0"):
        table.admit([new])


def table_of_two() -> SlotTable:
    """Make a table in which slot 1 has pages 5 and 6, slot 0 has page 2, of at most 8 each."""
    table = SlotTable(num_slots=3, context_length=32, num_pages=8, page_size=4, device=CPU)
    for slot, known, pages in ((1, 7, [5, 6]), (0, 1, [2])):
        new = NewSlot(slot, pack_ids(range(known)), 0, pack_ids(pages), 0.0, -1, 1.0, 0)
        table.admit([new])
    return table


def test_pages_are_appended_in_order_to_the_slots_that_grow() -> None:
    table = table_of_two()
    table.grow(np.array([1, 0, 1, 1]), np.array([7, 5, 0, 3]))
    table.grow(np.array([0]), np.array([1]))
    assert table.pages[0].tolist() == [2, 5, 1] + [8] * 5
    assert table.pages[1].tolist() == [5, 6, 7, 0, 3] + [8] * 3
    assert table.num_pages_of.tolist() == [3, 5, 0]


@pytest.mark.parametrize(
    ("slots", "pages", "message"),
    [
        ([2], [0], "grows slots .* not all of them held"),
        ([0, 3], [0, 0], "grows slots .* not all of them held"),
        ([-1], [0], "grows slots .* not all of them held"),
        ([0, 1], [0, 8], "pages .* must be 0 to 7"),
        ([0], [-1], "pages .* must be 0 to 7"),
        ([1] * 7, [0] * 7, r"slots \[1\] beyond 8 pages"),
    ],
)
def test_growth_that_does_not_add_up_is_refused(
    slots: list[int], pages: list[int], message: str
) -> None:
    table = table_of_two()
    with pytest.raises(ValueError, match=message):
        table.grow(np.array(slots), np.array(pages))
    assert table.num_pages_of.tolist() == [1, 2, 0]
