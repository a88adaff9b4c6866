"""`quadriga models check --device cuda`: what fits a GPU that is not here."""

import json
import struct
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from quadriga.server.cli.main import main
from quadriga.server.models.families.architectures import read_architecture
from quadriga.server.models.formats.quantization import BLOCK_SIZES, read_quantization
from quadriga.server.models.gpu_modes import GGUF_BITS, GpuWeights, stored_bits
from quadriga.server.models.gpu_table import AWQ, PUBLISHED, table_of_cards
from quadriga.server.models.weights import WeightSummary
from tests.tiny_models import tiny_llama, tiny_qwen2, write_tokenizer
from tests.unit.tiny_gguf import write_tiny_gguf
from tests.unit.worker.packed_matrices import random_rows
from worker_proc.gpu.quantized import kernel_rows, round_rows, why_not_gguf
from worker_proc.models.decoder import build_model
from worker_proc.models.layers import Embedding, Linear

DOCS = Path(__file__).parents[4] / "docs"
ITEM_BYTES = {"F16": 2, "BF16": 2, "I32": 4, "U8": 1}
Tensors = dict[str, tuple[str, list[int]]]


def check(model: Path, capsys: pytest.CaptureFixture[str], *flags: str) -> dict[str, Any]:
    """Return the report as JSON."""
    try:
        code = main(["models", "check", str(model), "--json", "--device", "cuda", *flags])
    except SystemExit as stop:
        code = int(stop.code or 0)
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert report["servable"] == (code == 0)
    return report


def modes_of(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {mode["name"]: mode for mode in report["gpu_modes"]}


def write_sparse(directory: Path, config: dict[str, Any], tensors: Tensors) -> Path:
    """Write a checkpoint of any size whose file has a header and a hole."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    write_tokenizer(directory)
    header, end = {}, 0
    for name, (dtype, shape) in tensors.items():
        begin, end = end, end + ITEM_BYTES[dtype] * int(torch.Size(shape).numel())
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with (directory / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
    return directory


def awq_14b(directory: Path) -> Path:
    """Write Qwen3 14B in AWQ."""
    config = PUBLISHED["Qwen3 14B"] | {"quantization_config": AWQ, "torch_dtype": "float16"}
    hidden, mlp, layers = config["hidden_size"], config["intermediate_size"], 40
    matrices = {
        "self_attn.q_proj": (hidden, 5120), "self_attn.k_proj": (hidden, 1024),
        "self_attn.v_proj": (hidden, 1024), "self_attn.o_proj": (5120, hidden),
        "mlp.gate_proj": (hidden, mlp), "mlp.up_proj": (hidden, mlp),
        "mlp.down_proj": (mlp, hidden),
    }  # fmt: skip
    vocabulary = ("F16", [config["vocab_size"], hidden])
    tensors: Tensors = {"model.embed_tokens.weight": vocabulary, "lm_head.weight": vocabulary}
    tensors["model.norm.weight"] = ("F16", [hidden])
    for layer in range(layers):
        for name, (inputs, outputs) in matrices.items():
            start = f"model.layers.{layer}.{name}"
            tensors[f"{start}.qweight"] = ("I32", [inputs, outputs // 8])
            tensors[f"{start}.qzeros"] = ("I32", [inputs // 128, outputs // 8])
            tensors[f"{start}.scales"] = ("F16", [inputs // 128, outputs])
        for name, size in (("input_layernorm", hidden), ("post_attention_layernorm", hidden),
                           ("self_attn.q_norm", 128), ("self_attn.k_norm", 128)):  # fmt: skip
            tensors[f"model.layers.{layer}.{name}.weight"] = ("F16", [size])
    return write_sparse(directory, config, tensors)


def gpt_oss_20b(directory: Path) -> Path:
    """Write gpt-oss-20b, whose experts are in MXFP4."""
    config = PUBLISHED["gpt-oss-20b"]
    hidden, vocabulary = config["hidden_size"], ("BF16", [config["vocab_size"], 2880])
    tensors: Tensors = {"model.embed_tokens.weight": vocabulary, "lm_head.weight": vocabulary}
    for layer in range(config["num_hidden_layers"]):
        start = f"model.layers.{layer}"
        for name, shape in (("q", [4096, hidden]), ("k", [512, hidden]), ("v", [512, hidden]),
                            ("o", [hidden, 4096])):  # fmt: skip
            tensors[f"{start}.self_attn.{name}_proj.weight"] = ("BF16", shape)
        for name, rows in (("gate_up", 2 * hidden), ("down", hidden)):
            experts = f"{start}.mlp.experts.{name}_proj"
            tensors[f"{experts}_blocks"] = ("U8", [32, rows, hidden // 32, 16])
            tensors[f"{experts}_scales"] = ("U8", [32, rows, hidden // 32])
    return write_sparse(directory, config, tensors)


def test_a_14b_model_in_awq_fits_24_gib_as_stored(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = awq_14b(tmp_path / "awq")
    report = check(model, capsys, "--gpu-memory", "24GiB")
    modes = modes_of(report)
    assert list(modes) == ["as stored", "bfloat16"], "codes are not rounded once more"
    in_files = sum(report["weight_bytes"].values())
    assert modes["as stored"]["weight_bytes"] == pytest.approx(in_files, rel=0.01)
    assert 9.5e9 < in_files < 10.5e9
    assert 45_000 < modes["as stored"]["num_tokens"] < 70_000
    assert modes["as stored"]["num_tokens_fp8"] == pytest.approx(
        2 * modes["as stored"]["num_tokens"], abs=2
    )
    assert (modes["bfloat16"]["num_tokens"], report["best_mode"]) == (0, "as stored")
    assert modes["bfloat16"]["weight_bytes"] == 2 * report["num_parameters"]
    assert report["max_context_here"] == report["context_length"] == 40_960
    assert report["modes"] == [] and report["memory_bandwidth"] is None
    small = check(model, capsys, "--gpu-memory", "16")
    assert 0 < small["max_context_here"] < 40_960
    refusal = check(model, capsys, "--gpu-memory", "10GiB")["refusal"]
    assert "the weights, as stored, and steps take 12." in refusal
    assert refusal.endswith("GiB of the GPU's 10.0: take a smaller model, or --tp")


def test_the_experts_of_gpt_oss_stay_in_mxfp4(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = gpt_oss_20b(tmp_path / "gpt-oss")
    report = check(model, capsys, "--gpu-memory", "24GiB")
    assert report["servable"] and report["best_mode"] == "as stored"
    modes, in_files = modes_of(report), sum(report["weight_bytes"].values())
    assert modes["as stored"]["weight_bytes"] == pytest.approx(in_files, rel=0.05)
    assert modes["as stored"]["num_tokens"] > 100_000
    assert modes["bfloat16"]["weight_bytes"] == pytest.approx(41.8e9, rel=0.01)
    assert modes["bfloat16"]["num_tokens"] == 0


def test_a_gguf_stays_as_stored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = check(
        write_tiny_gguf(tmp_path / "a.gguf", in_8_bits=True), capsys, "--gpu-memory", "8"
    )
    stored, dense = modes_of(report)["as stored"], modes_of(report)["bfloat16"]
    num_packed = report["weight_bytes"]["Q8_0"] * 32 // 34
    in_16_bits = report["num_parameters"] - num_packed
    assert stored["weight_bytes"] == report["weight_bytes"]["Q8_0"] + 2 * in_16_bits
    assert dense["weight_bytes"] == 2 * report["num_parameters"]
    assert (stored["flags"], dense["flags"]) == ("", "--quantization none")
    assert report["best_mode"] == "as stored"


def test_embeddings_experts_of_a_gguf_and_types_without_kernels_become_16_bits() -> None:
    config = read_architecture(PUBLISHED["Qwen3 4B"])
    summary = WeightSummary()
    for name, kind in (
        ("blk.0.attn_q.weight", "Q4_K"), ("blk.0.attn_v.weight", "Q6_K"), ("output.weight", "Q6_K"),
        ("token_embd.weight", "Q4_K"), ("blk.0.ffn_up_exps.weight", "Q4_K"),
        ("blk.0.ffn_up.weight", "IQ4_XS"), ("blk.0.attn_norm.weight", "F32"),
    ):  # fmt: skip
        summary.add(name, kind, 256, 0)
    weights = GpuWeights.of_files(config, summary, None)
    assert weights.stored == {5.0: 256, 7.0: 512}
    assert weights.num_other_codes == 3 * 256
    assert weights.num_bytes() == (256 * 5 + 512 * 7 + 4 * 256 * 16) / 8


def test_keys_with_biases_have_no_fp8(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for build, has_fp8 in ((tiny_qwen2, False), (tiny_llama, True)):
        report = check(build(tmp_path / build.__name__), capsys, "--gpu-memory", "8GiB")
        assert (report["gpu_modes"][0]["num_tokens_fp8"] is not None) == has_fp8


def test_no_more_tokens_fit_than_all_requests_can_have(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = check(tiny_llama(tmp_path / "model"), capsys, "--gpu-memory", "80GiB")
    assert {mode["num_tokens"] for mode in report["gpu_modes"]} == {256 * 256}


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_numbers_of_weights_are_those_of_the_model(name: str) -> None:
    config = PUBLISHED[name]
    weights = GpuWeights.of_config(read_architecture(config), 4.0)
    with torch.device("meta"):
        model = build_model(config, torch.bfloat16)
    linear = [layer for layer in model.modules() if isinstance(layer, Linear)]
    num_linear = sum(layer.weight.numel() for layer in linear)
    total = sum(values.numel() for values in model.parameters())
    assert weights.num_parameters == pytest.approx(total, rel=0.002)
    assert weights.num_linear == pytest.approx(num_linear, rel=0.002)
    assert any(isinstance(layer, Embedding) for layer in model.modules())


def test_the_bits_of_each_format_are_those_of_the_kernels() -> None:
    for kind in BLOCK_SIZES:
        assert (kind in GGUF_BITS) == (why_not_gguf(kind) == ""), kind
    for kind, bits in GGUF_BITS.items():
        packed = random_rows(kind, 64)
        rows = kernel_rows(packed.unpack(), torch.bfloat16)
        assert rows.num_bytes * 8 / rows.codes.numel() == bits, kind
    quantization = read_quantization({"quantization_config": AWQ})
    assert stored_bits("I32", quantization) == 4 + 20 / 128
    for flag, bits, expected in (("int8", 8, 8.5), ("int4", 4, 4.625)):
        rows = round_rows(torch.randn(64, 256), bits, torch.bfloat16)
        assert rows.num_bytes * 8 / rows.codes.numel() == expected, flag


def test_the_table_names_the_best_mode_and_what_is_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(tiny_llama(tmp_path / "model"))
    assert main(["models", "check", model, "--device", "cuda", "--gpu-memory", "24GB"]) == 0
    head, table, ending = capsys.readouterr().out.split("\n\n")
    assert "Triton kernels on a GPU" in head and "context that fits " in head
    assert [line.split("  ")[0] for line in table.splitlines()] == [
        "mode", "bfloat16", "int8", "int4", "best there: bfloat16, which needs no flag",
    ]  # fmt: skip
    assert "a GPU with 22.4 GiB" in ending and "80% of the rest" in ending


def test_the_memory_of_the_gpu_is_that_of_the_first_one_here(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_llama(tmp_path / "model")
    done = SimpleNamespace(stdout="24564 MiB\n8192 MiB\n")
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: done)
    assert check(model, capsys)["gpu_bytes"] == 24564 * 2**20


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        (["--device", "cuda"], "nvidia-smi finds no GPU here: say how much memory it has"),
        (["--device", "cuda", "--gpu-memory", "many"], "--gpu-memory is 'many': write a size"),
        (["--device", "cuda", "--gpu-memory", "1.2.3"], "--gpu-memory is '1.2.3': write a size"),
        (["--gpu-memory", "24GiB"], "--gpu-memory is about --device cuda"),
    ],
)
def test_a_size_that_is_none_is_refused(
    flags: list[str],
    error: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_command(*args: object, **kwargs: object) -> None:
        raise FileNotFoundError("nvidia-smi")

    monkeypatch.setattr(subprocess, "run", no_command)
    assert main(["models", "check", str(tiny_llama(tmp_path / "model")), *flags]) != 0
    assert error in capsys.readouterr().err


def test_the_table_of_models_and_gpus_is_in_the_docs() -> None:
    """`python -m quadriga.server.models.gpu_table` makes it."""
    assert table_of_cards() in (DOCS / "install-gpu.md").read_text()
