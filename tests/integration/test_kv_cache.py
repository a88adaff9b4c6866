"""KV pages on disk: greedy float32 tokens equal those of transformers, wherever pages come from."""

import asyncio
import os
import signal
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from quadriga.client import Client
from tests.integration.equality import NEW_TOKENS, lengths_up_to, prompts_of, references, serve_all
from tests.server import Server, running_server, settle, wait_until

RESTART_TIMEOUT_S = 60


def counters(server: Server) -> dict[str, int]:
    settle(server.endpoint, 60)
    with Client(server.endpoint, reconnect_timeout=RESTART_TIMEOUT_S) as client:
        info = client.info()
    names = ("pages", "loaded_tokens_total", "damaged_pages_total")
    return {name: int(info[f"kv_offload_{name}"]) for name in names}


def files_of(directory: Path) -> list[Path]:
    return sorted(directory.rglob("*.kv"))


def wait_until_stored(server: Server, directory: Path) -> None:
    """Wait until no page is on its way to a file; one that is overwritten before is not stored."""
    wait_until(lambda: len(files_of(directory)) == counters(server)["pages"], 60)


async def serve_while_the_worker_dies(server: Server, prompts: list[list[int]]) -> list[list[int]]:
    answers = asyncio.ensure_future(serve_all(server.endpoint, prompts))
    await asyncio.sleep(0.5)
    os.kill(server.pid_of("worker_proc"), signal.SIGKILL)
    return await answers


@pytest.mark.timeout(300)
def test_evicted_restarted_and_damaged_pages_give_the_tokens_of_transformers(
    llama_dir: Path, tmp_path: Path
) -> None:
    model = AutoModelForCausalLM.from_pretrained(llama_dir, dtype=torch.float32)
    prompts = prompts_of(lengths_up_to(model.config.max_position_embeddings - NEW_TOKENS, 16), 512)
    expected, directory = references(model, prompts), tmp_path / "kv"
    flags = ["--model", str(llama_dir), "--worker-threads", "1", "--dtype", "float32"]
    flags += ["--page-size", "4", "--chunked-prefill-size", "64", "--max-total-tokens", "1024"]
    flags += ["--kv-cache-dir", str(directory), "--max-running-requests", "8"]
    memory = ["--kv-offloading-size", "0.001"]
    with running_server(tmp_path / "log", *flags, *memory) as server:
        assert asyncio.run(serve_all(server.endpoint, prompts)) == expected
        wait_until_stored(server, directory)
        assert asyncio.run(serve_all(server.endpoint, prompts)) == expected
        assert counters(server)["loaded_tokens_total"] > 0, "the pool holds a part of the prompts"
        assert asyncio.run(serve_while_the_worker_dies(server, prompts)) == expected
        pid = server.pids["worker_proc"]
        wait_until(lambda: server.pid_of("worker_proc") not in (0, pid), RESTART_TIMEOUT_S)
        server.pids["worker_proc"] = server.pid_of("worker_proc")
        wait_until_stored(server, directory)
    damaged = files_of(directory)[::3]
    for path in damaged:
        path.write_bytes(path.read_bytes()[:-1] + b"?")
    with running_server(tmp_path / "log2", *flags) as server:
        assert asyncio.run(serve_all(server.endpoint, prompts)) == expected
        wait_until_stored(server, directory)
        found = counters(server)
        assert found["loaded_tokens_total"] > 0
        assert 0 < found["damaged_pages_total"] <= len(damaged)
