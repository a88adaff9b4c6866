"""The directory of a run, and what is in shared memory of it."""

import fcntl
import os
from pathlib import Path

import pytest

from quadriga.server.processes import run_dir
from quadriga.server.processes.run_dir import make_run_dir, remove_left_behind, remove_run_dir


@pytest.fixture(autouse=True)
def shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    directory = tmp_path / "shm"
    directory.mkdir()
    monkeypatch.setattr(run_dir, "SHARED_MEMORY", directory)
    return directory


def left_by(name: str, shared: Path, age_s: float = 3600.0) -> Path:
    """Make a directory as a server has made it some seconds ago."""
    pages = shared / name / "pages"
    pages.mkdir(parents=True)
    (pages / run_dir.LOCK).touch()
    then = (shared / name).stat().st_mtime - age_s
    os.utime(shared / name, (then, then))
    return shared / name


def test_what_a_run_has_in_shared_memory_goes_with_its_directory(shared_memory: Path) -> None:
    directory = make_run_dir()
    shared = run_dir.shared_dir(directory)
    assert shared == shared_memory / directory.name
    (shared / "pages").mkdir(parents=True)
    remove_run_dir(directory)
    assert not directory.exists() and not shared.exists()


def test_without_shared_memory_it_is_in_the_run_directory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(run_dir, "SHARED_MEMORY", tmp_path / "missing")
    directory = make_run_dir()
    assert run_dir.shared_dir(directory).parent == directory
    remove_run_dir(directory)


def test_only_a_directory_of_a_run_has_one_in_shared_memory(
    shared_memory: Path, tmp_path: Path
) -> None:
    (shared_memory / "data").mkdir()
    (tmp_path / "data").mkdir()
    remove_run_dir(tmp_path / "data")
    assert (shared_memory / "data").exists()


def test_what_dead_servers_have_left_is_removed_and_nothing_else(shared_memory: Path) -> None:
    dead = left_by("quadriga-dead", shared_memory)
    others = [
        left_by("quadriga-young", shared_memory, age_s=1.0),
        left_by("another-program", shared_memory),
    ]
    used = left_by("quadriga-used", shared_memory)
    lock = os.open(used / "pages" / run_dir.LOCK, os.O_RDWR)
    fcntl.flock(lock, fcntl.LOCK_EX)
    own = left_by("quadriga-own", shared_memory)
    remove_left_behind(own / "pages")
    assert own.exists()
    assert not dead.exists()
    assert used.exists() and all(directory.exists() for directory in others)
    os.close(lock)
    remove_left_behind(own)
    assert not used.exists()
