"""The tools for a machine with a GPU, as far as they run without one."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.cli.options import parse
from bench.gpu import all as run_all
from bench.gpu import prefill, prepare, products, profile
from bench.gpu.all import (
    FIRST_LIMIT_S,
    Setup,
    Stage,
    StageOutcome,
    StageResult,
    append_line,
    read_figures,
    stages_of,
    write_report,
)
from bench.gpu.profile import Kernel, Timeline, longest
from bench.peers.models import write_random_weights
from bench.roofline.roofline_model import Product, Work
from bench.worker_steps import MAX_TOKEN_ID, Row
from quadriga.errors import ConfigError
from quadriga.server.config.engine_args import ModelArgs
from quadriga.server.config.server_config import ServerConfig
from quadriga.server.models import resolve
from tests.tiny_models import tiny_llama

CPU_FLAGS = ["--load-format", "dummy", "--device", "cpu", "--attention-backend", "torch"]


def read_lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# --- prepare --------------------------------------------------------------------------------------


def no_network(*_: object, **__: object) -> Path:
    raise AssertionError("the built-in model was fetched")


def test_prepared_models_need_no_network(
    tmp_path: Path, llama_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resolve, "builtin_weights", no_network)
    monkeypatch.setattr(prepare, "builtin_weights", no_network)
    assert prepare.main([str(tmp_path), "--no-wheels", "--tokenizer", str(llama_dir)]) == 0
    for name, config in prepare.MODELS.items():
        files = resolve.resolve_model(ModelArgs(model=str(tmp_path / name), load_format="dummy"))
        assert files.vocab_size == config["vocab_size"]
        assert (files.tokenizer_dir / "tokenizer.json").is_file()
        assert (
            files.eos_token_ids
            == resolve.resolve_model(ModelArgs(model=str(llama_dir))).eos_token_ids
        )


def test_gpt2_with_random_weights_and_a_tokenizer_needs_no_network(
    llama_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resolve, "builtin_weights", no_network)
    args = ModelArgs(model="gpt2", load_format="dummy", tokenizer=str(llama_dir))
    assert resolve.resolve_model(args).tokenizer_dir == llama_dir


def test_files_that_are_too_large_to_carry_are_refused_with_their_size(
    tmp_path: Path, llama_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--no-wheels", "--tokenizer", str(llama_dir), "--max-megabytes", "0.0001"]
    assert prepare.main([str(tmp_path), *flags]) == 1
    assert "--max-megabytes is 0.0001" in capsys.readouterr().err


def test_a_directory_without_a_tokenizer_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--no-wheels", "--tokenizer", str(tmp_path)]
    assert prepare.main([str(tmp_path / "files"), *flags]) == 2
    assert "has no tokenizer.json" in capsys.readouterr().err


# --- all ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_each_stage_runs_a_module_that_exists(device: str) -> None:
    stages = stages_of(Setup(Path("models"), device))
    assert len({stage.name for stage in stages}) == len(stages)
    for stage in stages:
        if "-m" in stage.command:
            module = stage.command[stage.command.index("-m") + 1]
            assert importlib.util.find_spec(module) is not None, module


def test_the_loads_are_runs_of_the_bench() -> None:
    for device in ("cpu", "cuda"):
        loads = [
            s for s in stages_of(Setup(Path("models"), device)) if "bench.serving" in s.command
        ]
        assert len(loads) == 5
        for stage in loads:
            target = parse([*stage.command[3:], "--json", "figures.json"]).target
            assert target.config is not None and target.config.worker.device == device


def test_the_first_stages_answer_within_ten_minutes() -> None:
    first = [stage for stage in stages_of(Setup(Path("models"), "cuda")) if stage.is_first]
    assert sum(stage.limit_s for stage in first) <= FIRST_LIMIT_S
    assert run_all.chosen(stages_of(Setup(Path("models"), "cuda")), None, True) == first


def python(name: str, code: str, limit_s: int = 60, missing: str = "") -> Stage:
    return Stage(name, (sys.executable, "-c", code), limit_s, gives_figures=False, missing=missing)


def test_a_stage_that_fails_or_hangs_does_not_end_the_others(tmp_path: Path) -> None:
    hanging = "import time; print('begun', flush=True); time.sleep(600)"
    stages = [
        python("good", "print('fine')"),
        python("bad", "import sys; print('broken'); sys.exit(3)"),
        python("slow", hanging, limit_s=1),
        python("lacking", "", missing="there is no card"),
    ]
    results = [run_all.run_stage(stage, tmp_path) for stage in stages]
    outcomes = [result.outcome for result in results]
    assert outcomes == [
        StageOutcome.PASSED,
        StageOutcome.FAILED,
        StageOutcome.STOPPED,
        StageOutcome.NOT_RUN,
    ]
    for result in results:
        append_line(tmp_path / "results.jsonl", result)
    write_report(tmp_path / "report.md", results, "cpu")
    report = (tmp_path / "report.md").read_text()
    assert "| slow | stopped at its limit |" in report
    assert "broken" in report and "there is no card" in report
    lines = read_lines(tmp_path / "results.jsonl")
    assert [line["outcome"] for line in lines] == [outcome.value for outcome in outcomes]


def test_children_of_a_stage_end_with_it() -> None:
    code = (
        "import subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print(child.pid, flush=True)\n"
        "child.wait()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True
    )
    assert process.stdout is not None
    with process.stdout as output:
        assert int(output.readline()) > 0
        run_all.stop_group(process)
        assert output.read() == b"", "the child has the pipe open as long as it lives"


def test_figures_of_a_stopped_stage_are_its_complete_lines(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    assert read_figures(path) == []
    path.write_text('{"a": 1}\n{"a": 2}\n{"a"')
    assert read_figures(path) == [{"a": 1}, {"a": 2}]
    path.write_text('{\n "a": 3\n}')
    assert read_figures(path) == [{"a": 3}]


def test_figures_of_a_stage_are_tables_of_the_report(tmp_path: Path) -> None:
    stage = python("measured", "print(1)")
    log = tmp_path / "measured.log"
    figures = [{"table": "speeds", "what": "read", "GB/s": 2.5}]
    write_report(
        tmp_path / "report.md", [StageResult(stage, StageOutcome.PASSED, 1, log, figures)], "cpu"
    )
    assert "| what | GB/s |\n| --- | --- |\n| read | 2.5 |" in (tmp_path / "report.md").read_text()


def test_models_that_are_not_prepared_are_named_with_the_remedy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_all.main([str(tmp_path), "--out", str(tmp_path / "out")]) == 2
    assert "python -m bench.gpu.prepare" in capsys.readouterr().err
    assert run_all.main([str(tmp_path), "--only", "nothing"]) == 2
    assert "the stages are ceilings, kernel-tests" in capsys.readouterr().err


def test_a_stage_writes_its_figures_to_the_results(tmp_path: Path, llama_dir: Path) -> None:
    models = tmp_path / "models"
    prepare.main([str(models), "--no-wheels", "--tokenizer", str(llama_dir)])
    out = tmp_path / "out"
    assert (
        run_all.main([str(models), "--device", "cpu", "--out", str(out), "--only", "ceilings"]) == 0
    )
    (line,) = read_lines(out / "results.jsonl")
    assert line["outcome"] == "passed" and line["figures"]
    assert "| python |" in (out / "report.md").read_text()


# --- profile, prefill, products -------------------------------------------------------------------


def test_overlapping_kernels_are_busy_once_and_what_lies_between_is_a_gap() -> None:
    ran = [Kernel(10, 20, "b"), Kernel(0, 5, "a"), Kernel(15, 18, "a"), Kernel(30, 31, "b")]
    timeline = Timeline.of(ran)
    assert (timeline.wall_us, timeline.busy_us) == (31, 16)
    assert timeline.gaps_us == (5, 10)
    assert timeline.busy_share == 16 / 31
    assert longest(ran, 1) == [("b", 2, 11)]
    assert Timeline.of([]).busy_share == 0


def test_steps_are_profiled(tmp_path: Path) -> None:
    file = tmp_path / "profile.json"
    sizes = ["--batches", "1", "2", "--context", "8", "--prompt", "6", "--steps", "2"]
    flags = [
        "--model",
        str(tiny_llama(tmp_path, vocab_size=MAX_TOKEN_ID)),
        *CPU_FLAGS,
        "--json",
        str(file),
    ]
    assert profile.main([*flags, *sizes]) == 0
    rows = read_lines(file)
    steps = [row for row in rows if "busy share" in row]
    assert [row["step"] for row in steps] == [
        "1 rows of 8 tokens", "2 rows of 8 tokens", "2 rows, and 6 of a prompt",
    ]  # fmt: skip
    assert all(0 < float(str(row["busy share"])) <= 1 for row in steps)
    assert any(row.get("kernel") for row in rows)


def test_prompts_are_measured_as_operations_per_second(tmp_path: Path) -> None:
    file = tmp_path / "prefill.json"
    sizes = ["--shapes", "1x8", "2x4+16", "1x99999", "--steps", "1", "--ceiling-width", "32"]
    flags = [
        "--model",
        str(tiny_llama(tmp_path, vocab_size=MAX_TOKEN_ID)),
        *CPU_FLAGS,
        "--json",
        str(file),
    ]
    assert prefill.main([*flags, *sizes]) == 0
    assert [row["prompts"] for row in read_lines(file)] == ["1x8", "2x4+16"], "one is too long"


def test_operations_of_prompts_are_those_of_products_and_attention() -> None:
    work = Work((Product(10, 20), Product(10, 100, sampled=True)), ((6, 6), (6, 6)), 2, 2)
    rows = (Row(0, 3), Row(5, 2))
    products = 2 * 5 * 200 + 2 * 2 * 1000
    attention = 4 * 6 * (6 + 13) + 4 * 6 * (3 + 7)
    assert prefill.operations(work, rows) == products + attention


@pytest.mark.parametrize("shape", ["8", "x8", "2x1", "0x8", "2x8+", "2x8+a", "2x8x3"])
def test_a_shape_that_is_none_is_refused(shape: str) -> None:
    if shape == "2x8+":
        assert prefill.rows_of(shape) == (Row(0, 8),) * 2
        return
    with pytest.raises(ConfigError, match="--shapes"):
        prefill.rows_of(shape)


def test_the_pool_of_the_prompts_holds_the_largest_step_and_no_more() -> None:
    config = prefill.fitted(ServerConfig(), [(Row(0, 31),) * 2, (Row(100, 4),)])
    assert config.worker.max_total_tokens == 112
    assert config.scheduler.prefill_budget(1) == 62


def test_products_are_measured_by_each_way_that_is_there_and_the_others_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "products.json"
    flags = ["--device", "cpu", "--tiny", "--rows", "1", "8", "--json", str(file)]
    assert products.main(flags) == 0
    rows = read_lines(file)
    assert [(row["product"], row["rows"]) for row in rows] == [("tiny qkv", 1), ("tiny qkv", 8)]
    assert all(float(str(row[way])) > 0 for row in rows for way in ("cublas", "floor"))
    left_out = capsys.readouterr().err
    assert "tiny qkv, humming-int4: needs a GPU" in left_out


def test_a_product_with_a_wrong_result_is_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.nn.functional.linear", lambda x, weight: x @ weight.T * 2)
    assert products.main(["--device", "cpu", "--tiny", "--rows", "1", "--ways", "cublas"]) == 0
    assert "its result differs by 1" in capsys.readouterr().err


def test_all_servers_load_the_same_weights_and_know_every_id(tmp_path: Path) -> None:
    source = tiny_llama(tmp_path / "source", vocab_size=600)
    (source / "model.safetensors").unlink()
    write_random_weights(source, tmp_path / "model")
    write_random_weights(source, tmp_path / "again")
    weights = [tmp_path / name / "model.safetensors" for name in ("model", "again")]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    tokenizer = json.loads((tmp_path / "model" / "tokenizer.json").read_text())
    assert len(tokenizer["model"]["vocab"]) == 600
    assert resolve.resolve_model(ModelArgs(model=str(tmp_path / "model"))).vocab_size == 600
