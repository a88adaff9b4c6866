"""The kernels are compiled once, for the requested CPU, and errors name their cause."""

import logging
import os
import platform
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from quadriga.errors import ConfigError
from quadriga.server.config.engine_args import WorkerArgs
from quadriga.server.processes.machine import COMPILER_VARIABLE, NoCompiler
from tests.tiny_models import tiny_llama
from tests.unit.worker.compared_engines import (
    QUANTIZED_TOLERANCE,
    TOLERANCE,
    Compared,
    drive,
    native,
    reference,
    round_weights,
)
from tests.unit.worker_driver import load_on_cpu
from worker_proc.cpu import build, levels
from worker_proc.cpu import build as compute_type
from worker_proc.cpu import engine as kernels_engine
from worker_proc.cpu.build import (
    ARCH_VARIABLE,
    ISA_VARIABLE,
    fastest_compute_type,
    load_kernels,
)
from worker_proc.cpu.levels import LEVELS, Level, find_prebuilt, this_machine
from worker_proc.cpu.program import ComputeType
from worker_proc.engines.factory import make_engine
from worker_proc.engines.torch_engine import TorchEngine

CPU = torch.device("cpu")


def test_kernels_of_the_installation_are_those_of_the_best_level_that_the_cpu_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(levels, "PREBUILT", tmp_path)
    tiles, best, other = LEVELS["x86_64"]
    assert find_prebuilt("x86_64", best.features) is None
    for level in (tiles, best, other):
        (tmp_path / f"{level.name}.so").touch()
    assert find_prebuilt("x86_64", tiles.features) == tmp_path / f"{tiles.name}.so"
    assert find_prebuilt("x86_64", best.features | {"sse2"}) == tmp_path / f"{best.name}.so"
    assert find_prebuilt("x86_64", best.features - {"avx512_bf16"}) == tmp_path / f"{other.name}.so"
    assert find_prebuilt("x86_64", other.features - {"fma"}) is None
    assert find_prebuilt("riscv64", best.features) is None


def test_kernels_of_the_installation_are_not_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = build._library()
    level = Level("mine", (), frozenset())
    monkeypatch.setattr(levels, "PREBUILT", tmp_path)
    monkeypatch.setitem(LEVELS, this_machine(), (level,))
    monkeypatch.setenv(COMPILER_VARIABLE, "/nowhere")
    (tmp_path / "mine.so").write_bytes(compiled.read_bytes())
    monkeypatch.delenv(ARCH_VARIABLE, raising=False)
    assert build._library() == tmp_path / "mine.so"
    load_kernels()


def test_the_kernels_are_compiled_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """By a compiler that notes its commands and links what the real one has compiled before."""
    calls, compiler = tmp_path / "calls", tmp_path / "compiler"
    compiled = build._library()
    compiler.write_text(
        f"""#!/bin/sh
        echo "$@" >> {calls}
        for last; do :; done
        case "$*" in *-shared*) cp {compiled} "$last";; *-version*) echo 1;; esac
        """
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("QUADRIGA_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv(COMPILER_VARIABLE, str(compiler))
    with caplog.at_level(logging.INFO):
        load_kernels()
        load_kernels()
    assert caplog.text.count("compiling the kernels") == 1
    assert len(list((tmp_path / "cache" / "kernels").iterdir())) == 1
    commands = calls.read_text().splitlines()
    sources = list(levels.SOURCES.glob("*.cpp"))
    for source in sources:
        assert len([command for command in commands if str(source) in command]) == 1
    work = [command for command in commands if "--version" not in command]
    assert len(work) == len(sources) + 1, "each source is compiled, and they are linked, once"
    assert all("-O3" in command and "-march=" in command for command in work)


def test_a_cache_that_takes_nothing_is_named_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("QUADRIGA_CACHE", str(tmp_path / "file"))
    with pytest.raises(NoCompiler, match=r"cannot take the kernels .*make room there, or set QUA"):
        load_kernels()
    monkeypatch.setattr(build, "_library", lambda: tmp_path / "file")
    with pytest.raises(NoCompiler, match=r"file cannot be loaded .*remove it"):
        load_kernels()


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the levels are those of x86-64")
@pytest.mark.parametrize("level", ["x86-64-v3", "x86-64"])
def test_a_cpu_with_smaller_vectors_gets_the_same_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, level: str
) -> None:
    """The levels have vectors of 256 and of 128 bits."""
    monkeypatch.setenv(ARCH_VARIABLE, level)
    directory = tiny_llama(tmp_path / "model")
    for dtype, within in TOLERANCE.items():
        engine = Compared(native(directory, dtype, 16), reference(directory, dtype, 16), within)
        drive(engine, dtype, 16, seed=3)
        for bits in (8, 4):
            theirs = reference(directory, dtype, 16)
            round_weights(theirs, bits)
            ours = native(directory, dtype, 16, bits=bits, int8=True)
            drive(Compared(ours, theirs, QUANTIZED_TOLERANCE), dtype, 16, seed=3)


@pytest.mark.parametrize("numbers", [ComputeType.BFLOAT16, ComputeType.BFLOAT16_PAIRS])
def test_bfloat16_is_multiplied_either_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, numbers: ComputeType
) -> None:
    """Check both compute types, of which a server uses the faster one."""
    pairs = bool(load_kernels().quadriga_bfloat16_instructions())
    if numbers is ComputeType.BFLOAT16_PAIRS and not pairs:
        assert fastest_compute_type(load_kernels(), torch.bfloat16) is ComputeType.BFLOAT16
        pytest.skip("this CPU has no instruction for pairs of bfloat16")
    monkeypatch.setattr(kernels_engine, "fastest_compute_type", lambda *_: numbers)
    directory, dtype = tiny_llama(tmp_path), torch.bfloat16
    for int8, page_size in ((False, 16), (True, 16), (False, 8)):
        ours = native(directory, dtype, page_size, int8=int8)
        within = QUANTIZED_TOLERANCE if int8 else TOLERANCE[dtype]
        drive(
            Compared(ours, reference(directory, dtype, page_size), within), dtype, page_size, seed=4
        )


def test_a_restart_multiplies_bfloat16_in_the_same_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = SimpleNamespace(_name=str(tmp_path / "kernels.so"))
    measured = [ComputeType.BFLOAT16_PAIRS, ComputeType.BFLOAT16, ComputeType.BFLOAT16_PAIRS]
    monkeypatch.setattr(compute_type, "_measure", lambda _: measured.pop(0))
    for _ in range(3):
        chosen = fastest_compute_type(library, torch.bfloat16)  # type: ignore[arg-type]
        assert chosen is ComputeType.BFLOAT16_PAIRS
    assert fastest_compute_type(library, torch.float32) is ComputeType.FLOAT32  # type: ignore[arg-type]
    (kept,) = tmp_path.iterdir()
    kept.write_text("nothing that is known")
    library.quadriga_vector_bits = lambda: 512
    assert fastest_compute_type(library, torch.bfloat16) is ComputeType.BFLOAT16  # type: ignore[arg-type]
    assert kept.read_text() == "BFLOAT16"


def test_instructions_are_forced_and_forbidden(monkeypatch: pytest.MonkeyPatch) -> None:
    library = load_kernels()
    has_pairs = bool(library.quadriga_bfloat16_instructions())
    monkeypatch.setenv(ISA_VARIABLE, "no-amx,no-pairs")
    assert fastest_compute_type(library, torch.bfloat16) is ComputeType.BFLOAT16
    monkeypatch.setenv(ISA_VARIABLE, "pairs")
    if has_pairs:
        assert fastest_compute_type(library, torch.bfloat16) is ComputeType.BFLOAT16_PAIRS
    else:
        with pytest.raises(ConfigError, match="QUADRIGA_KERNEL_ISA has pairs, and the kernels"):
            fastest_compute_type(library, torch.bfloat16)
    monkeypatch.setattr(build, "_request_tiles", lambda: False)
    monkeypatch.setenv(ISA_VARIABLE, "amx")
    with pytest.raises(ConfigError, match="has amx, and this CPU or its system has no AMX tiles"):
        load_kernels()
    monkeypatch.setenv(ISA_VARIABLE, "no-amx,mmx")
    with pytest.raises(ConfigError, match="has 'mmx'; it takes amx, no-amx, pairs, no-pairs"):
        load_kernels()


def test_tiles_are_compiled_where_the_system_permits_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_request_tiles", lambda: True)
    assert build._uses_tiles()
    monkeypatch.setenv(ISA_VARIABLE, "no-amx")
    assert not build._uses_tiles()
    monkeypatch.delenv(ISA_VARIABLE)
    monkeypatch.setattr(build, "_request_tiles", lambda: False)
    assert not build._uses_tiles()


def test_a_compiler_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(COMPILER_VARIABLE, "no-such-compiler")
    with pytest.raises(NoCompiler, match="CXX is 'no-such-compiler', which is not a command here"):
        load_kernels()


def test_an_architecture_that_the_compiler_does_not_know_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUADRIGA_CACHE", str(tmp_path))
    monkeypatch.setenv(ARCH_VARIABLE, "abacus")
    with pytest.raises(NoCompiler, match=r"cannot compile the kernels: .*abacus"):
        load_kernels()
    assert list((tmp_path / "kernels").iterdir()) == []


def test_without_a_compiler_plain_torch_computes_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv(COMPILER_VARIABLE, raising=False)
    monkeypatch.setenv("PATH", os.fspath(tmp_path))
    model = load_on_cpu(tiny_llama(tmp_path / "model"), torch.float32)
    with caplog.at_level(logging.WARNING):
        engine = make_engine(WorkerArgs(), model, 64, torch.float32, CPU)
    assert isinstance(engine, TorchEngine)
    assert "no C++ compiler is here" in caplog.text
    for args in (
        WorkerArgs(attention_backend="native"),
        WorkerArgs(enable_deterministic_inference=True),
    ):
        with pytest.raises(NoCompiler):
            make_engine(args, model, 64, torch.float32, CPU)


def test_quantized_weights_need_the_kernels(tmp_path: Path) -> None:
    model = load_on_cpu(tiny_llama(tmp_path), torch.float32)
    args = WorkerArgs(attention_backend="torch", quantization="int8")
    with pytest.raises(ConfigError, match="quantization int8 needs the native kernels"):
        make_engine(args, model, 64, torch.float32, CPU)
