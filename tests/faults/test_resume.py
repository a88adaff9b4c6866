"""All processes die at once, and the next run continues every accepted request."""

import time
from pathlib import Path

import pytest

from bench.client.server import free_port
from quadriga.server.processes.control_channel import EXIT_START_FAILED
from scheduler_proc.journal.writer import FILE_NAME
from tests.faults.streams import TIMEOUT_S, ClientLoad
from tests.server import cut_the_power, run_launcher, running_server, settle


def flags(llama_dir: Path) -> list[str]:
    return ["--model", str(llama_dir), "--dtype", "float32", "--worker-threads", "1",
            "--max-total-tokens", "16384"]  # fmt: skip


@pytest.mark.timeout(240)
def test_after_a_power_cut_every_accepted_request_finishes_as_if_nothing_had_happened(
    llama_dir: Path, tmp_path: Path
) -> None:
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    journal = tmp_path / "journal"
    options = [*flags(llama_dir), "--journal", str(journal)]
    with running_server(tmp_path / "first", *options, endpoint=endpoint) as server:
        expected = ClientLoad(endpoint).results()
        disturbed = ClientLoad(endpoint)
        assert disturbed.started.wait(TIMEOUT_S)
        cut_the_power(server)
    assert (journal / FILE_NAME).stat().st_size > 1000
    code, output = run_launcher(*options, endpoint=endpoint)
    assert code == EXIT_START_FAILED
    assert "unfinished requests of an earlier run: add --resume" in output
    began = time.monotonic()
    with running_server(tmp_path / "second", *options, "--resume", endpoint=endpoint) as server:
        assert disturbed.results() == expected
        print(f"all finished {time.monotonic() - began:.1f} s after the start of the next run")
        assert settle(endpoint)["pages_held"] == 0
    assert not (journal / FILE_NAME).exists(), "nothing is left to go on with"
