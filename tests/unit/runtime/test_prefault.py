"""Memory that a thread takes while something else is done."""

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from quadriga.config.server_config import ModelArgs
from quadriga.model_files.resolve import resolve_model
from worker_proc.system import prefault as memory
from worker_proc.system.prefault import memory_meanwhile

# In a process of its own: in this one other tests' memory comes and goes.
WATCHED = """
import ctypes, sys, time
import psutil
from worker_proc.system.prefault import memory_meanwhile

PR_SET_THP_DISABLE, SIZE = 41, 64 << 20
if sys.argv[1] == "small":
    assert ctypes.CDLL(None).prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0) == 0
resident = lambda: psutil.Process().memory_info().rss
before, deadline = resident(), time.monotonic() + 20
with memory_meanwhile(SIZE):
    while resident() < before + SIZE * 0.9:
        assert time.monotonic() < deadline, resident() - before
        time.sleep(0.001)
assert resident() < before + SIZE * 0.1
"""


@pytest.mark.skipif(sys.platform != "linux", reason="small pages are asked for as Linux has it")
@pytest.mark.parametrize("pages", ["large", "small"])
def test_memory_is_taken_while_the_body_runs_and_given_back_after_it(pages: str) -> None:
    subprocess.run([sys.executable, "-c", WATCHED, pages], check=True, timeout=60)


@pytest.mark.parametrize("size", [1 << 33, 1 << 60])
def test_the_body_does_not_wait_for_it(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(memory, "MAX_MEANWHILE", size)
    with memory_meanwhile(size):
        pass
    assert "memory" not in {thread.name for thread in threading.enumerate()}


def test_nothing_is_taken_where_nothing_is_needed() -> None:
    with memory_meanwhile(0):
        assert "memory" not in {thread.name for thread in threading.enumerate()}


def test_what_the_weights_need_is_the_size_of_their_files(llama_dir: Path) -> None:
    files = resolve_model(ModelArgs(model=str(llama_dir)))
    assert files.weights_bytes == (llama_dir / "model.safetensors").stat().st_size
    dummy = resolve_model(ModelArgs(model=str(llama_dir), load_format="dummy"))
    assert dummy.weights_bytes == 0
