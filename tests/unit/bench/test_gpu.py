"""The GPU benches, as far as they run without a GPU."""

import sys
from pathlib import Path

import pytest
import torch

from bench.gpu import blocks, decode_floor, transformers_batching
from tests.tiny_models import tiny_llama


def test_the_floor_of_decode_steps_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {
        "BATCHES": (1, 3),
        "CONTEXTS": (16,),
        "NUM_STEPS": 3,
        "NUM_WARM_UP": 1,
    }.items():
        monkeypatch.setattr(decode_floor, name, value)
    monkeypatch.setattr(decode_floor, "READ_BYTES", 2**20)
    model = tiny_llama(tmp_path)
    decode_floor.main(["--model", str(model), "--device", "cpu", "--dtype", "float32"])
    title, _, *lines = capsys.readouterr().out.splitlines()
    assert "float32 on cpu" in title
    assert [line.split()[:2] for line in lines] == [["1", "16"], ["3", "16"]]
    for line in lines:
        graph, eager, floor, _ = map(float, line.split()[2:])
        assert graph > floor and eager > floor


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_without_a_gpu_one_line_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert transformers_batching.main([]) == 2
    assert "torch finds no GPU" in capsys.readouterr().err


def test_the_blocks_are_runs_of_the_bench(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["blocks", "--dry-run", "--model", "gpt2"])
    with pytest.raises(SystemExit) as ended:
        blocks.main()
    assert ended.value.code == 0
    commands = [line for line in capsys.readouterr().out.splitlines() if "bench.serving" in line]
    assert len(commands) == len(blocks.BLOCKS)
    assert all("--device cuda --model gpt2" in command for command in commands)
