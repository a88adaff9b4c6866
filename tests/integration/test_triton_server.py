"""A server whose worker computes with Triton's kernels: on a GPU, or in the interpreter."""

import asyncio
from pathlib import Path

import pytest

from tests.integration.equality import NEW_TOKENS, generate
from tests.references import greedy_of
from tests.server import running_server
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
