"""The output of a batch: each line once, whatever a crash leaves."""

import os
from pathlib import Path

import msgspec
import pytest

from http_proc.jobs.batch_lines import LineLog
from quadriga import disk


def output(custom_id: str) -> bytes:
    return msgspec.json.encode({"custom_id": custom_id, "response": {}, "error": None})


def opened(directory: Path) -> LineLog:
    log = LineLog(directory / "answers", directory / "failures")
    for _ in log.open():
        pass
    return log


def test_a_line_is_written_once_also_after_a_restart(tmp_path: Path) -> None:
    log = opened(tmp_path)
    assert log.append("a", output("a"), False)
    assert log.append("b", output("b"), True)
    assert not log.append("a", output("a"), True)
    log.close()
    again = opened(tmp_path)
    assert (again.num_completed, again.num_failed) == (1, 1)
    assert again.has("a") and again.has("b") and not again.has("c")
    assert not again.append("b", output("b"), False)
    assert (tmp_path / "answers").read_bytes() == output("a") + b"\n"


@pytest.mark.parametrize("cut", range(1, len(output("b")) + 1))
def test_a_line_that_was_cut_is_removed_and_can_be_answered(tmp_path: Path, cut: int) -> None:
    log = opened(tmp_path)
    for name in ("a", "b"):
        log.append(name, output(name), False)
    log.close()
    path = tmp_path / "answers"
    os.truncate(path, path.stat().st_size - cut)
    again = opened(tmp_path)
    assert again.has("a") and not again.has("b") and again.num_completed == 1
    assert again.append("b", output("b"), False)
    again.close()
    assert path.read_bytes() == output("a") + b"\n" + output("b") + b"\n"


def test_what_follows_a_hole_is_answered_again(tmp_path: Path) -> None:
    lines = [output("a"), b"\0" * 20, output("c")]
    (tmp_path / "answers").write_bytes(b"".join(line + b"\n" for line in lines))
    log = opened(tmp_path)
    assert log.has("a") and not log.has("c")
    assert (tmp_path / "answers").read_bytes() == output("a") + b"\n"


def test_a_full_disk_leaves_no_half_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = opened(tmp_path)
    log.append("a", output("a"), False)
    write_all = disk.write_all

    def write_half(fd: int, data: bytes) -> None:
        write_all(fd, data[:5])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(disk, "write_all", write_half)
    with pytest.raises(OSError, match="No space"):
        log.append("b", output("b"), False)
    monkeypatch.undo()
    assert log.append("b", output("b"), False)
    assert (tmp_path / "answers").read_bytes() == output("a") + b"\n" + output("b") + b"\n"


def test_nothing_is_written_after_the_end(tmp_path: Path) -> None:
    log = opened(tmp_path)
    log.close()
    assert not log.append("a", output("a"), False)
    assert (tmp_path / "answers").read_bytes() == b""
