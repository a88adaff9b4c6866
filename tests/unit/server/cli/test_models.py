"""`quadriga models`: the list, the check, and what neither of them may load."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from quadriga.server.cli.main import main
from quadriga.server.cli.models import check_model
from quadriga.server.config.engine_args import OTHER_FRACTION
from quadriga.server.models.weight_modes import (
    PROCESS_BYTES,
    Weights,
    memory_bandwidth,
    weight_modes,
)
from tests.tiny_encoders import tiny_bert
from tests.tiny_models import add_unserved_tokens, like_llama, tiny_gpt2, tiny_llama, tiny_mistral
from tests.unit.fake_server import running_fake_server
from tests.unit.tiny_gguf import write_tiny_gguf


@pytest.fixture(autouse=True)
def own_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUADRIGA_CACHE", str(tmp_path / "cache"))
    hub = tmp_path / "hub"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(hub))
    monkeypatch.setattr("quadriga.server.cli.models.memory_bandwidth", lambda threads: 50e9)
    monkeypatch.setattr("quadriga.server.cli.models.find_compiler", lambda: "c++")


def check(model: Path | str, capsys: pytest.CaptureFixture[str], *flags: str) -> dict[str, Any]:
    """Return the report as JSON, with the exit code."""
    try:
        code = main(["models", "check", str(model), "--json", *flags])
    except SystemExit as stop:
        code = int(stop.code or 0)
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert report["servable"] == (code == 0)
    return report


def changed(directory: Path, **changes: Any) -> Path:
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return directory


def test_a_servable_model_is_described(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = check(tiny_llama(tmp_path / "model"), capsys)
    assert report["way"] in ("native kernels", "torch")
    assert report["architecture"] == "llama"
    assert report["rope"] == "default"
    assert report["vocab_size"] == 512
    assert report["tokenizer"] and report["chat_template"]
    # 3 layers, 2 key/value heads of 16
    assert report["kv_bytes_per_token"] == {
        "float32": 768, "bfloat16": 384, "int8": 240, "fp8": 192,
    }  # fmt: skip
    assert report["weight_bytes"] == {"F32": 4 * report["num_parameters"]}
    assert report["context_length"] == report["max_context_here"] == 256


def test_a_gpt2_and_a_gguf_are_servable(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check(tiny_gpt2(tmp_path / "model"), capsys)["rope"] == "learned positions"
    report = check(write_tiny_gguf(tmp_path / "tiny.gguf"), capsys)
    assert report["servable"]
    assert report["weight_bytes"].keys() == {"F32", "F16"}


def test_refusals_are_the_servers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = changed(tiny_llama(tmp_path / "model"), model_type="bloom", architectures=[])
    report = check(model, capsys)
    assert report["way"] == "refused"
    native, _, transformers = report["refusal"].partition("; by --model-impl transformers: ")
    assert native.startswith(f"{model}: config.json names bloom as its architecture; supported: ")
    assert transformers.startswith("BloomForCausalLM of transformers ")


def test_an_unsupported_architecture_is_named_before_its_window(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = changed(
        tiny_llama(tmp_path / "model"), model_type="bloom", architectures=[], sliding_window=64
    )
    assert "names bloom as its architecture" in check(model, capsys)["refusal"]


def test_what_no_native_file_runs_is_left_to_transformers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = changed(
        tiny_llama(tmp_path / "model"), model_type="cohere", architectures=["CohereForCausalLM"]
    )
    assert check(model, capsys)["way"].startswith("transformers")
    refusal = check(model, capsys, "--model-impl", "native")["refusal"]
    assert "names cohere" in refusal
    assert "transformers" not in refusal


def test_code_of_a_repository_needs_the_flag_that_the_refusal_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = changed(
        tiny_llama(tmp_path / "model"),
        model_type="acorn",
        architectures=["AcornForCausalLM"],
        auto_map={"AutoModelForCausalLM": "modeling_acorn.Acorn"},
    )
    assert "--trust-remote-code" in check(model, capsys, "--model-impl", "transformers")["refusal"]
    assert check(model, capsys, "--trust-remote-code")["way"].startswith("transformers")


def test_the_context_that_fits_is_not_bounded_by_the_pool_where_every_layer_has_a_window(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    windowed = tiny_mistral(tmp_path / "windowed")
    whole = tiny_mistral(tmp_path / "whole", sliding_window=None)
    report = check(windowed, capsys)
    assert (report["servable"], report["window"]) == (True, 24)
    assert check(whole, capsys)["window"] == 0
    token_bytes = report["kv_bytes_per_token"][
        "bfloat16" if "native" in report["way"] else "float32"
    ]
    weights = report["num_parameters"] * (2 if "native" in report["way"] else 4)
    for num_tokens, expected in ((48, 256), (47, 47)):  # 24 tokens begin or end in 3 pages of 16
        available = weights + (num_tokens + 0.5) * token_bytes / OTHER_FRACTION
        memory = SimpleNamespace(available=available)
        monkeypatch.setattr("psutil.virtual_memory", lambda m=memory: m)
        assert check(windowed, capsys)["max_context_here"] == expected
        assert check(whole, capsys)["max_context_here"] == num_tokens


def by_name(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {mode["name"]: mode for mode in report["modes"]}


def test_each_way_to_keep_the_weights_has_bytes_memory_and_speed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = check(tiny_llama(tmp_path / "model"), capsys)
    modes, count = by_name(report), report["num_parameters"]
    assert [(name, mode["flags"]) for name, mode in modes.items()] == [
        ("bfloat16", ""),
        ("int8", "--quantization int8"),
        ("int4", "--quantization int4"),
        ("float32", "--dtype float32"),
    ]
    for name, item_bytes in {"bfloat16": 2, "int8": 34 / 32, "int4": 20 / 32, "float32": 4}.items():
        assert modes[name]["weight_bytes"] == round(count * item_bytes)
        assert modes[name]["memory_bytes"] == modes[name]["weight_bytes"] + PROCESS_BYTES
    speeds = [modes[name]["tokens_per_s"] for name in ("float32", "bfloat16", "int8", "int4")]
    assert speeds == sorted(speeds)
    assert (report["memory_bandwidth"], report["best_mode"]) == (50e9, "int8")


def test_the_head_is_read_for_each_token_and_the_embedding_only_if_it_is_the_head(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for tied in (True, False):
        mode = by_name(check(tiny_llama(tmp_path / str(tied), tie=tied), capsys))["float32"]
        skipped = 0 if tied else 4 * 512 * 96  # vocabulary and hidden size
        assert mode["weight_bytes"] - mode["bytes_per_token"] == skipped


def test_a_quantized_file_is_best_as_stored(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf", in_8_bits=True)
    report = check(path, capsys)
    stored = report["modes"][0]
    assert (stored["name"], stored["flags"]) == ("as stored", "")
    assert stored["weight_bytes"] == sum(report["weight_bytes"].values())
    assert by_name(report)["bfloat16"]["flags"] == "--quantization none"
    assert report["best_mode"] == "as stored"


def test_the_best_mode_fits_in_the_memory_that_is_free(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_llama(tmp_path / "model")
    modes = by_name(check(model, capsys))
    for name, more in (("int8", 1), ("int4", 1), ("", 0)):
        memory = SimpleNamespace(available=modes[name or "int4"]["memory_bytes"] + more)
        monkeypatch.setattr("psutil.virtual_memory", lambda m=memory: m)
        assert check(model, capsys)["best_mode"] == name


def test_a_mode_that_fits_is_named_where_the_default_one_does_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_llama(tmp_path / "model")
    modes = by_name(check(model, capsys))
    monkeypatch.setattr("quadriga.server.models.weight_modes.PROCESS_BYTES", 0)
    memory = SimpleNamespace(available=modes["bfloat16"]["weight_bytes"])
    monkeypatch.setattr("psutil.virtual_memory", lambda: memory)
    refusal = check(model, capsys)["refusal"]
    assert refusal.endswith("take --quantization int8, a smaller model or free memory")


def test_the_table_names_the_best_mode_with_its_flag(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["models", "check", str(tiny_llama(tmp_path / "model"))]) == 0
    _, table, ending = capsys.readouterr().out.split("\n\n")
    assert [line.split("  ")[0] for line in table.splitlines()] == [
        "mode", "bfloat16", "int8", "int4", "float32", "best here: int8, --quantization int8",
    ]  # fmt: skip
    assert "none (default)" in table
    assert "estimates for this machine's CPU, which reads 50 GB/s" in ending


def test_an_encoder_takes_no_steps_and_has_no_modes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = check(tiny_bert(tmp_path / "model"), capsys)
    assert (report["servable"], report["modes"]) == (True, [])


def test_a_token_reads_the_experts_that_it_chooses(tmp_path: Path) -> None:
    from transformers import MixtralConfig, MixtralForCausalLM

    changes = {"num_local_experts": 4, "num_experts_per_tok": 1}
    model = like_llama(MixtralForCausalLM, MixtralConfig, tmp_path / "model", False, changes)
    config = json.loads((model / "config.json").read_text())
    mode = check_model(str(model)).modes[0]
    one = 3 * config["hidden_size"] * config["intermediate_size"]
    embedding = config["vocab_size"] * config["hidden_size"]
    skipped = config["num_hidden_layers"] * 3 * one + embedding
    assert mode.weight_bytes - mode.bytes_per_token == 2 * skipped
    assert mode.tokens_per_s is None


def test_estimates_are_near_measured_speeds() -> None:
    """Those of two cores of AMD Zen 5 that read 72 GB/s, in docs/hardware.md."""
    qwen = Weights(1_777_088_000, 151_936 * 1536, 1_111_400_000, 28)
    modes = {mode.name: mode for mode in weight_modes(qwen, "gguf", 72e9)}
    for name, speed, memory in (
        ("as stored", 50, 1.9e9), ("int8", 36, 2.6e9), ("bfloat16", 24, 4.2e9),
    ):  # fmt: skip
        assert modes[name].tokens_per_s == pytest.approx(speed, rel=0.25)
        assert modes[name].memory_bytes == pytest.approx(memory, rel=0.25)


def test_the_bandwidth_is_one_of_a_computer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quadriga.server.models.weight_modes.MEASURED_BYTES", 2**24)
    monkeypatch.setattr("quadriga.server.models.weight_modes.MEASURED_S", 0.02)
    assert 5e8 < memory_bandwidth(2) < 1e13


def test_a_missing_tokenizer_has_a_remedy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, other = tiny_llama(tmp_path / "model"), tiny_gpt2(tmp_path / "other")
    (model / "tokenizer.json").unlink()
    assert "--tokenizer" in check(model, capsys)["refusal"]
    (model / "tokenizer.model").write_bytes(b"")
    assert "--tokenizer" in check(model, capsys)["refusal"]
    assert check(model, capsys, "--tokenizer", str(other))["servable"]


@pytest.mark.parametrize("size", [4, 100, -100])
def test_weights_that_are_cut_short_are_refused(
    size: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tiny_llama(tmp_path / "model")
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:size])
    assert f"cannot read {weights}" in check(model, capsys)["refusal"]


def test_what_is_not_on_this_machine_is_not_fetched(capsys: pytest.CaptureFixture[str]) -> None:
    assert "quadriga serve a/b fetches it" in check("a/b", capsys)["refusal"]
    for name, size in (("smollm2-135m", "93 MB"), ("gemma3-270m", "238 MB")):
        refusal = check(name, capsys)["refusal"]
        assert (
            refusal
            == f"{name} is not fetched yet; quadriga serve --model {name} fetches it ({size})"
        )
    assert "no such file" in check("./none", capsys)["refusal"]


def test_the_list_has_caches_and_the_served_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    repository = tmp_path / "hub" / "models--org--tiny"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("0" * 40)
    shutil.copytree(tiny_llama(tmp_path / "model"), repository / "snapshots" / ("0" * 40))
    assert main(["models", "--json", "--endpoint", "tcp://127.0.0.1:1"]) == 0
    builtin, gemma, minilm, cached = json.loads(capsys.readouterr().out)
    assert builtin["where"] == "built-in, not fetched yet (93 MB)"
    assert (gemma["name"], gemma["num_bytes"]) == ("gemma3-270m", None)
    assert (minilm["name"], minilm["num_bytes"]) == ("all-minilm-l6-v2", None)
    assert (cached["name"], cached["architecture"]) == ("org/tiny", "llama")
    assert cached["num_bytes"] > 0
    assert main(["models", "--endpoint", "tcp://127.0.0.1:1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["name", "where", "architecture", "size"]
    assert len(lines) == 5


def test_the_model_of_a_server_that_answers_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    with running_fake_server() as server:
        assert main(["models", "--json", "--endpoint", server.endpoint]) == 0
    served = json.loads(capsys.readouterr().out)[-1]
    assert (served["name"], served["where"]) == ("fake", f"served at {server.endpoint}")


def test_a_package_that_is_not_installed_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "psutil", None)
    assert main(["models", "check", str(tiny_llama(tmp_path / "model"))]) == 1
    assert "models check needs the package psutil: pip install" in capsys.readouterr().err


def test_a_check_does_not_import_torch(tmp_path: Path) -> None:
    model = tiny_llama(tmp_path / "model")
    code = (
        "import sys; from quadriga.server.cli.main import main;"
        f"code = main(['models', 'check', {str(model)!r}]);"
        "sys.exit(code or 9 * ('torch' in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
    assert "way" in done.stdout


def test_ids_that_the_model_does_not_have_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = add_unserved_tokens(tiny_llama(tmp_path / "model", eos_token_id=[2, 99999]))
    of_config, of_tokenizer = check(model, capsys)["notes"]
    assert of_config.startswith("eos_token_id names 99999, ")
    assert "'<|beyond|>' (512), '<|above|>' (513)" in of_tokenizer
    assert main(["models", "check", str(model)]) == 0
    assert capsys.readouterr().out.count("\nnote ") == 2
