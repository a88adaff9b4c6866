"""The capacity search with a server that it starts and stops itself."""

import json
from pathlib import Path

import psutil
import pytest

from bench.capacity import __main__ as capacity
from simulator import cost_model
from tests.waiting import wait_until


@pytest.mark.timeout(120)
def test_a_search_starts_a_server_measures_it_and_leaves_nothing_behind(
    llama_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capacity, "MIN_SIMULATED", 20)
    monkeypatch.setattr(capacity, "MAX_SIMULATED", 100)
    monkeypatch.setattr(capacity, "PROBE_S", 1.0)
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    out = tmp_path / "out.json"
    flags = f"--slo ttft_p50:400 --model {llama_dir} --dtype float32 --worker-threads 1"
    flags += f" --max-total-tokens 8192 --random-input-len 16 --max-new-tokens 4 --json {out}"
    flags += f" --cost-model {cost_model.DEFAULT} --verify-seconds 0.2"
    flags += f" --server-log {tmp_path / 'log'}"
    assert capacity.main(flags.split()) in (0, 1)
    measured = [point for point in json.loads(out.read_text())["points"] if point["measured"]]
    assert measured
    assert all(point["failed"] == 0 and point["ttft_p50"] > 0 for point in measured)

    def leftovers() -> set[int]:
        return {child.pid for child in psutil.Process().children(recursive=True)} - before

    wait_until(lambda: not leftovers(), 5.0)
