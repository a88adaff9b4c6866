"""A server that cannot start prints the reason in one line and leaves nothing behind."""

import glob
import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.client.server import free_port
from quadriga.server.processes.control_channel import EXIT_START_FAILED, EXIT_USAGE
from tests.server import Server, launch, run_launcher, wait_until


@pytest.fixture(autouse=True)
def own_temporary_directory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run launchers with a temporary directory that no server of another test uses."""
    with tempfile.TemporaryDirectory() as directory:
        monkeypatch.setenv("TMPDIR", directory)
        yield


def run_dirs() -> set[str]:
    return set(glob.glob(f"{os.environ['TMPDIR']}/quadriga-*"))


@pytest.mark.parametrize(
    ("flags", "code", "named"),
    [
        (["--no-such-flag"], EXIT_USAGE, "there is no flag --no-such-flag"),
        (["--max-batch-size", "0"], EXIT_USAGE, " --max-batch-size must be positive"),
        (
            ["--prefill-max-batch-size", "-3"],
            EXIT_USAGE,
            " --prefill-max-batch-size must be positive",
        ),
        (
            ["--prefill-replicas", "auto"],
            EXIT_USAGE,
            "--prefill-replicas is auto and --dp is 1: start with --dp 2 or more",
        ),
        (["--max-batch-size", "many"], EXIT_USAGE, "invalid int value: 'many'"),
        (["--dtype", "float12"], EXIT_USAGE, "float12"),
        (["--model", "./no/such/model"], EXIT_START_FAILED, "no such file or directory"),
        (["--model", "nobody/no-such-model"], EXIT_START_FAILED, "nobody/no-such-model"),
    ],
)
def test_a_wrong_flag_or_model_is_one_clear_line(flags: list[str], code: int, named: str) -> None:
    before = run_dirs()
    got, output = run_launcher(*flags)
    assert got == code, output
    assert named in output.strip().splitlines()[-1]
    assert "Traceback" not in output
    assert run_dirs() <= before


def test_a_taken_port_is_named_with_the_remedy(server: Server, llama_dir: Path) -> None:
    code, output = run_launcher("--model", str(llama_dir), endpoint=server.endpoint)
    assert code == EXIT_START_FAILED
    assert f"{server.endpoint} is taken" in output
    assert "--endpoint" in output
    assert "Traceback" not in output


def test_a_model_whose_weights_are_broken_is_named(tmp_path: Path, llama_dir: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in llama_dir.iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    (broken / "model.safetensors").write_bytes(b"not a tensor")
    code, output = run_launcher("--model", str(broken))
    assert code == EXIT_START_FAILED
    assert "worker_proc could not start" in output
    assert "safetensors" in output.splitlines()[-1]


def test_a_start_that_takes_too_long_ends_with_the_late_process(llama_dir: Path) -> None:
    code, output = run_launcher("--model", str(llama_dir), "--start-timeout", "0.2")
    assert code == EXIT_START_FAILED
    assert "not ready within 0.2 s" in output


def test_a_signal_while_starting_stops_it(llama_dir: Path) -> None:
    before = run_dirs()
    process = launch(f"tcp://127.0.0.1:{free_port()}", "--model", str(llama_dir))
    wait_until(lambda: run_dirs() - before, 20)
    process.send_signal(signal.SIGINT)
    try:
        process.communicate(timeout=10)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    assert process.returncode not in (0, -signal.SIGKILL)
    assert not run_dirs() - before
