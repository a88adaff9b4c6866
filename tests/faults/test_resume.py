"""All processes die at once, and the next run continues every accepted request."""

import asyncio
import os
import shutil
import signal
import threading
import time
from pathlib import Path

import pytest

from bench.client.server import free_port
from quadriga.client import AsyncClient, Completion, SamplingParams
from quadriga.server.processes.control_channel import EXIT_START_FAILED
from scheduler_proc.journal.writer import FILE_NAME
from tests.faults.test_start import run_launcher
from tests.server import Server, running_server, settle

PARAMS = [
    SamplingParams(temperature=temperature, seed=seed, max_new_tokens=200, ignore_eos=True)
    for seed in range(12)
    for temperature in (0.0, 1.0)
]
PROMPTS = [[3 + n, 5, 7 * n % 500 + 3, 9] for n in range(len(PARAMS))]
TIMEOUT_S = 90.0


def flags(llama_dir: Path) -> list[str]:
    return ["--model", str(llama_dir), "--dtype", "float32", "--worker-threads", "1",
            "--max-total-tokens", "16384"]  # fmt: skip


class ClientLoad(threading.Thread):
    """A client with many requests.

    Attributes:
        started: Set when streams have tokens.
    """

    def __init__(self, endpoint: str) -> None:
        super().__init__()
        self.started = threading.Event()
        self.completions: list[Completion] = []
        self._endpoint = endpoint
        self.start()

    def run(self) -> None:
        self.completions = asyncio.run(self._run_all())

    async def _run_all(self) -> list[Completion]:
        async with AsyncClient(self._endpoint, TIMEOUT_S, reconnect_timeout=TIMEOUT_S) as client:
            requests = (self._one(client, number) for number in range(len(PARAMS)))
            return await asyncio.gather(*requests)

    async def _one(self, client: AsyncClient, number: int) -> Completion:
        handle = client.submit(PROMPTS[number], PARAMS[number], stream=number % 3 > 0)
        tokens, text = 0, ""
        async for chunk in handle:
            tokens += len(chunk.token_ids)
            text += chunk.text
            if tokens > 40:
                self.started.set()
        assert chunk.completion is not None
        assert (text, tokens) == (chunk.completion.text, len(chunk.completion.token_ids))
        return chunk.completion

    def results(self) -> list[tuple[str, list[int], str]]:
        self.join(TIMEOUT_S)
        assert self.completions, "some request did not finish"
        return [(c.text, c.token_ids, c.finish_reason) for c in self.completions]


def cut_the_power(server: Server) -> None:
    """Kill every process and remove the run directory; only the journal's directory is left."""
    for pid in (server.process.pid, *server.pids.values()):
        os.kill(pid, signal.SIGKILL)
    server.process.wait()
    shutil.rmtree(server.run_dir, ignore_errors=True)


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
