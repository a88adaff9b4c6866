"""Packed weights that one worker leaves to the next: the same numbers, to the last bit."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from quadriga.errors import ModelError
from quadriga.server.config.server_config import ServerConfig
from quadriga.server.models.resolve import ModelFiles, resolve_model
from tests.tiny_experts import tiny_qwen3_moe
from tests.tiny_models import tiny_gpt2, tiny_llama
from tests.unit.gguf_checkpoint import gguf_of
from tests.unit.worker.compared_engines import Compared, drive
from tests.waiting import wait_until
from worker_proc.cpu.engine import NativeEngine
from worker_proc.startup.build import make_runner
from worker_proc.step.runner import Runner

PAGE_SIZE = 16
FLAGS = {"max_total_tokens": 4096, "page_size": PAGE_SIZE, "attention_backend": "native"}
GGUF_KINDS = {"attn_v": Kind.Q8_0, "attn_q": Kind.Q5_0, "ffn_gate": Kind.Q4_1, "output": Kind.F16}


def files_of(directory: Path, **flags: object) -> tuple[ServerConfig, ModelFiles]:
    config = ServerConfig().replace(model=str(directory), **FLAGS, **flags)
    return config, resolve_model(config.model)


def gguf(directory: Path) -> tuple[ServerConfig, ModelFiles]:
    def kind_of(name: str) -> Kind:
        return next((kind for part, kind in GGUF_KINDS.items() if f"{part}." in name), Kind.Q4_0)

    model = tiny_llama(directory, tie=False, attention_bias=True, intermediate_size=160)
    return ServerConfig().replace(**FLAGS, quantization="gguf"), gguf_of(model, kind_of)


CASES: dict[str, Callable[[Path], tuple[ServerConfig, ModelFiles]]] = {
    "float32": lambda path: files_of(tiny_gpt2(path), dtype="float32"),
    "bfloat16": lambda path: files_of(tiny_llama(path), dtype="bfloat16"),
    "int8": lambda path: files_of(tiny_llama(path), quantization="int8"),
    "int4": lambda path: files_of(tiny_llama(path), quantization="int4"),
    "experts": lambda path: files_of(tiny_qwen3_moe(path), dtype="bfloat16"),
    "gguf": gguf,
}


def load(config: ServerConfig, files: ModelFiles, run_dir: Path) -> tuple[Runner, list[str]]:
    """Return a runner, and the phases of its start."""
    phases: list[str] = []
    runner = make_runner(config, files, on_phase=phases.append, run_dir=run_dir, keeps_packed=True)
    wait_until(lambda: (run_dir / "packed-main").exists(), 20)
    return runner, phases


@pytest.mark.parametrize("case", CASES)
def test_the_next_worker_reads_what_the_first_one_packed(case: str, tmp_path: Path) -> None:
    config, files = CASES[case](tmp_path / "model")
    first, phases = load(config, files, tmp_path)
    assert "pack weights and make the KV pool" in phases
    second, phases = load(config, files, tmp_path)
    assert "read packed weights and make the KV pool" in phases
    assert "measure inputs" not in phases
    assert isinstance(first.engine, NativeEngine)
    with torch.inference_mode():
        drive(Compared(first.engine, second.engine, 0.0), first.dtype, PAGE_SIZE, seed=10)


def test_other_weights_are_packed_again(tmp_path: Path) -> None:
    for size in (96, 128):
        config, files = files_of(tiny_gpt2(tmp_path / str(size), n_inner=size), dtype="float32")
        _, phases = load(config, files, tmp_path)
        assert "pack weights and make the KV pool" in phases


def test_a_file_that_is_cut_is_removed_and_the_next_start_packs_again(tmp_path: Path) -> None:
    config, files = files_of(tiny_gpt2(tmp_path / "model"), dtype="float32")
    load(config, files, tmp_path)
    file = tmp_path / "packed-main"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ModelError, match="removed, and the next start packs them again"):
        load(config, files, tmp_path)
    _, phases = load(config, files, tmp_path)
    assert "pack weights and make the KV pool" in phases


def test_without_room_on_the_disk_there_is_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, files = files_of(tiny_gpt2(tmp_path / "model"), dtype="float32")
    monkeypatch.setattr("worker_proc.cpu.pack_store.SPARE_SHARE", 1e12)
    make_runner(config, files, run_dir=tmp_path, keeps_packed=True)
    assert not (tmp_path / "packed-main").exists()
