"""Writers that replace one file at one time."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from quadriga import disk


def test_of_two_writers_of_one_file_neither_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, barrier, replace = tmp_path / "state", threading.Barrier(2, timeout=30), os.replace

    def together(source: str | Path, target: str | Path) -> None:
        barrier.wait()
        replace(source, target)

    monkeypatch.setattr(os, "replace", together)
    contents = [b"one" * 1000, b"two" * 2000]
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(disk.replace, [path, path], contents))
    assert path.read_bytes() in contents and os.listdir(tmp_path) == ["state"]
    assert path.stat().st_mode & 0o777 == disk.FILE_MODE


def test_a_write_that_fails_leaves_the_old_content_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(fd: int, data: bytes) -> None:
        raise OSError("no space")

    path = tmp_path / "state"
    disk.replace(path, b"old")
    monkeypatch.setattr(disk, "write_all", refuse)
    with pytest.raises(OSError, match="no space"):
        disk.replace(path, b"new")
    assert path.read_bytes() == b"old" and os.listdir(tmp_path) == ["state"]
