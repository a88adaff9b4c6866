"""A server whose worker computes with Triton's kernels: on a GPU, or in the interpreter."""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from quadriga.client import Client
from tests.integration.equality import NEW_TOKENS, generate
from tests.references import greedy_of
from tests.server import Server, running_server, wait_until
from tests.tiny_models import tiny_llama
from tests.triton_device import DEVICE
from tests.unit.worker_driver import prompts_of


@pytest.mark.timeout(90)
def test_greedy_tokens_equal_those_of_transformers(tmp_path: Path) -> None:
    directory, log = tiny_llama(tmp_path / "model", num_hidden_layers=1), tmp_path / "log"
    prompts = prompts_of([3, 20])
    flags = ["--model", str(directory), "--device", DEVICE.type, "--attention-backend", "triton"]
    flags += ["--dtype", "float32", "--worker-threads", "1", "--chunked-prefill-size", "16"]
    flags += ["--max-batch-size", "4", "--max-running-requests", "4"]
    with running_server(log, *flags, "--max-total-tokens", "512") as server:
        answers = asyncio.run(generate(server.endpoint, prompts))
    assert answers == greedy_of(directory, prompts, NEW_TOKENS)
    assert all(len(answer) == NEW_TOKENS for answer in answers)
    assert "triton backend" in log.read_text()


def loaded_tokens(server: Server) -> int:
    with Client(server.endpoint) as client:
        return int(client.info()["kv_offload_loaded_tokens_total"])


async def answers_of(server: Server, prompts: list[list[int]]) -> list[list[int]]:
    """Return answers to one request after the other."""
    return [(await generate(server.endpoint, [prompt]))[0] for prompt in prompts]


@pytest.mark.timeout(180)
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
def test_pages_that_left_the_gpu_give_the_same_tokens(kv_cache_dtype: str, tmp_path: Path) -> None:
    """The pool holds one of the prompts: pages leave it for memory and disk, and come back."""
    directory = tiny_llama(tmp_path / "model", num_hidden_layers=1)
    prompts = prompts_of([33, 35, 30])
    flags = ["--model", str(directory), "--device", DEVICE.type, "--attention-backend", "triton"]
    flags += ["--dtype", "float32", "--worker-threads", "1", "--chunked-prefill-size", "32"]
    flags += ["--max-batch-size", "2", "--max-running-requests", "2", "--page-size", "4"]
    flags += ["--max-total-tokens", "64", "--kv-cache-dtype", kv_cache_dtype]
    memory, files = ["--kv-offloading-size", "0.001"], ["--kv-cache-dir", str(tmp_path / "kv")]
    with running_server(tmp_path / "log", *flags) as server:
        expected = asyncio.run(answers_of(server, prompts))
    if kv_cache_dtype == "auto":
        assert expected == greedy_of(directory, prompts, NEW_TOKENS)
    with running_server(tmp_path / "log1", *flags, *memory, *files) as server:
        for _ in range(2):
            assert asyncio.run(answers_of(server, prompts)) == expected
        before = loaded_tokens(server)
        assert before > 0, "the pool holds one of the prompts"
        pid = server.pids["worker_proc"]
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: server.pid_of("worker_proc") not in (0, pid), 60)
        server.pids["worker_proc"] = server.pid_of("worker_proc")
        assert asyncio.run(answers_of(server, prompts)) == expected
        assert loaded_tokens(server) > before
    with running_server(tmp_path / "log2", *flags, *files) as server:
        assert asyncio.run(answers_of(server, prompts)) == expected
        assert loaded_tokens(server) >= sum(len(prompt) // 4 * 4 - 4 for prompt in prompts)
    assert "tokens of this model" in (tmp_path / "log2").read_text()
