"""The GPU benches, as far as they run without a GPU."""

import json
from pathlib import Path

import pytest

from bench.gpu import ceilings, decode_floor
from bench.gpu.decode_floor import FloorSizes
from quadriga.server.config.server_config import ServerConfig
from tests.tiny_models import tiny_llama


def test_the_floor_of_decode_steps_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(decode_floor, "NUM_WARM_UP", 1)
    monkeypatch.setattr(ceilings, "CPU_BYTES", 2**20)
    sizes = ["--batches", "1", "3", "--contexts", "16", "--steps", "3", "--ceiling-width", "256"]
    file = tmp_path / "floor.json"
    flags = ["--model", str(tiny_llama(tmp_path)), "--device", "cpu", "--dtype", "float32"]
    assert decode_floor.main([*flags, *sizes, "--json", str(file)]) == 0
    assert "float32 on cpu" in capsys.readouterr().out
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(row["rows"], row["context"]) for row in rows] == [(1, 16), (3, 16)]
    for row in rows:
        assert row["alone ms"] is None, "a CPU has no graphs"
        assert row["graph ms"] > row["floor ms"] and row["eager ms"] > row["floor ms"]


def test_the_documented_batches_and_contexts_fit_gpt2s_context_and_pool() -> None:
    sizes = FloorSizes(decode_floor.BATCHES, decode_floor.CONTEXTS).cut_to(1024)
    assert sizes.contexts == (128, 967) and sizes.room == 1024
    args = sizes.fitted(ServerConfig()).worker
    assert args.max_total_tokens == max(sizes.batches) * 1024, "no more than its rows need"
    assert FloorSizes((256,), (1000,)).fitted(ServerConfig()).worker.max_total_tokens == 256 * 1072


def test_a_context_too_short_for_the_steps_is_refused_with_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tiny_llama(tmp_path, max_position_embeddings=32)
    assert decode_floor.main(["--model", str(model), "--device", "cpu"]) == 2
    assert "the model's context is 32 tokens, 50 steps need 58" in capsys.readouterr().err
