"""What the measurement of a start reads from a server's log, and its table."""

from pathlib import Path

import pytest

from bench.start import StartTimes, main, phases_of, rows_of

LOG = """
19:20:04 worker_proc DEBUG starting as process 14103
19:21:24 launcher INFO   launcher: find model 0.1 s
19:21:24 launcher INFO   worker_proc: import torch 3.4 s, make the KV pool 1.2 s, warm up 0.3 s
19:21:24 launcher INFO   detok_proc: load tokenizer 0.6 s
19:21:24 launcher INFO quadriga ready in 8.4 s · smollm2-135m bfloat16 cpu
"""


def test_the_phases_of_every_process_are_read() -> None:
    assert phases_of(LOG) == {
        "find model": 0.1,
        "import torch": 3.4,
        "make the KV pool": 1.2,
        "warm up": 0.3,
        "load tokenizer": 0.6,
    }


def test_a_row_is_the_median_of_the_starts() -> None:
    starts = [
        StartTimes(ready, ready + 1, {"launcher": 0.25, "worker_proc": ready}, {"warm up": ready})
        for ready in (4.0, 2.0, 3.0)
    ]
    assert rows_of(starts) == {
        "to the ready line": 3.0,
        "to the first token": 4.0,
        "CPU of all processes": 3.25,
        "CPU of launcher": 0.25,
        "CPU of worker_proc": 3.0,
        "warm up": 3.0,
    }


def test_a_directory_without_a_launcher_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["bench.start", "--checkout", str(tmp_path)])
    with pytest.raises(SystemExit, match=r"there is no .*launcher.py; --checkout takes"):
        main()
