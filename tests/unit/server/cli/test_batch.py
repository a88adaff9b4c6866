"""`quadriga batch` against a gateway before a scripted ring."""

import asyncio
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from http_proc.core.gateway import Gateway
from quadriga.server.cli import batch as command
from quadriga.server.cli.main import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, main
from tests.unit.http.batch.batch_client import ids, input_file, ring
from tests.unit.scripted_ring import ScriptedRing, run_at_gateway


@pytest.fixture(autouse=True)
def fast_polls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(command, "POLL_S", 0.01)
    monkeypatch.chdir(tmp_path)


def run(test: Any, scripted: ScriptedRing) -> None:
    async def with_gateway(gateway: Gateway) -> None:
        def quadriga(*flags: str) -> int:
            return main(["batch", "in.jsonl", "-o", "out.jsonl", "--url", gateway.args.url, *flags])

        await asyncio.to_thread(test, quadriga)

    run_at_gateway(scripted, with_gateway, data_dir=str(Path.cwd() / "data"), port=PORT)


PORT = 28_000 + os.getpid() % 2000


def test_a_file_of_requests_becomes_a_file_of_answers(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_bytes(input_file(5) + b"\n" + other_model())

    def test(quadriga: Any) -> None:
        assert quadriga() == EXIT_OK

    run(test, ring())
    assert set(ids((tmp_path / "out.jsonl").read_bytes()).values()) == {1}
    assert len((tmp_path / "out.jsonl").read_bytes().splitlines()) == 5
    assert list(ids((tmp_path / "out.jsonl.errors").read_bytes())) == ["other"]
    assert not (tmp_path / "out.jsonl.state").exists()


def other_model() -> bytes:
    line = json.loads(input_file(1, model="other"))
    return json.dumps(line | {"custom_id": "other"}).encode()


def test_a_batch_goes_on_after_ctrl_c_and_a_restart_of_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "in.jsonl").write_bytes(input_file(5))
    stalled = ring()
    stalled.leaves_open = True

    def interrupt(_: float) -> None:
        raise KeyboardInterrupt

    def stop(quadriga: Any) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(time, "sleep", interrupt)
            assert quadriga() == EXIT_INTERRUPTED

    def go_on(quadriga: Any) -> None:
        assert quadriga() == EXIT_OK

    run(stop, stalled)
    assert (tmp_path / "out.jsonl.state").exists() and not (tmp_path / "out.jsonl").exists()
    run(go_on, ring())
    assert len(ids((tmp_path / "out.jsonl").read_bytes())) == 5
    assert len(list((tmp_path / "data/batches").iterdir())) == 1, "one batch, not two"


def test_errors_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "in.jsonl").write_bytes(input_file(1) + b"\n{\n")

    def test(quadriga: Any) -> None:
        assert quadriga() == EXIT_FAILED
        assert "the batch was refused: line 2: " in capsys.readouterr().err
        (tmp_path / "in.jsonl").write_bytes(b"no json")
        assert quadriga() == EXIT_FAILED
        assert "line 1 is no request" in capsys.readouterr().err
        assert quadriga("--cancel") == EXIT_FAILED
        assert "no batch of this output" in capsys.readouterr().err
        (tmp_path / "in.jsonl").write_bytes(input_file(1))
        assert quadriga("--url", "http://127.0.0.1:9") == EXIT_FAILED
        assert capsys.readouterr().err.startswith("ServerUnreachable: no server answers at")

    run(test, ring())
