"""Batches with OpenAI's client, and what kills leave of them."""

import json
import os
import random
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import openai
import pytest

from bench.client.server import free_port
from tests.faults.power_cuts import NO_POWER_CUTS, PowerCuts
from tests.server import running_server, wait_until

NUM_LINES = 200
URL: Any = "/v1/completions"


def input_file(path: Path, count: int = NUM_LINES) -> Path:
    body = {"prompt": [5, 6, 7], "max_tokens": 96, "ignore_eos": True, "temperature": 0}
    lines = [
        {"custom_id": f"line-{number}", "method": "POST", "url": URL, "body": body}
        for number in range(count)
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def flags(llama_dir: Path, port: int) -> list[str]:
    """Return the flags of a server without a directory for data."""
    return ["--model", str(llama_dir), "--dtype", "float32", "--worker-threads", "1",
            "--max-total-tokens", "8192", "--port", str(port),
            "--served-model-name", "tiny", "--batch-concurrency", "4"]  # fmt: skip


def connect(port: int) -> openai.OpenAI:
    """Return a client that does not wait between tries, so that it sees the batch under way."""
    url = f"http://127.0.0.1:{port}/v1"
    return openai.OpenAI(base_url=url, api_key="none", timeout=20, max_retries=0)


def start(client: openai.OpenAI, path: Path) -> str:
    with path.open("rb") as file:
        uploaded = client.files.create(file=file, purpose="batch")
    return client.batches.create(
        input_file_id=uploaded.id, endpoint=URL, completion_window="24h"
    ).id


def num_completed(client: openai.OpenAI, batch_id: str) -> int:
    try:
        counts = client.batches.retrieve(batch_id).request_counts
    except openai.APIError:  # the gateway is being replaced
        return 0
    return counts.completed if counts else 0


def wait_for_lines(client: openai.OpenAI, batch_id: str, count: float) -> None:
    """Wait until so many lines are answered, and check that others are not."""
    wait_until(lambda: num_completed(client, batch_id) >= count, 60)
    assert num_completed(client, batch_id) < NUM_LINES, "the batch was to be interrupted"


def wait_for_every_line_once(client: openai.OpenAI, batch_id: str) -> None:
    wait_until(lambda: num_completed(client, batch_id) == NUM_LINES, 90)
    wait_until(lambda: client.batches.retrieve(batch_id).status == "completed", 10)
    batch = client.batches.retrieve(batch_id)
    assert batch.output_file_id and not batch.error_file_id
    lines: list[Any] = [
        json.loads(line) for line in client.files.content(batch.output_file_id).text.splitlines()
    ]
    assert Counter(line["custom_id"] for line in lines) == Counter(
        f"line-{number}" for number in range(NUM_LINES)
    )
    texts = {line["response"]["body"]["choices"][0]["text"] for line in lines}
    assert len(texts) == 1, "greedy answers to one prompt"


@pytest.mark.timeout(240)
def test_a_batch_survives_the_death_of_the_gateway(llama_dir: Path, tmp_path: Path) -> None:
    port = free_port()
    with running_server(tmp_path / "log", *flags(llama_dir, port)) as server:
        client = connect(port)
        kept: Any = client.responses.create(model="tiny", input="x", max_output_tokens=4)
        assert kept.store is True
        batch_id = start(client, input_file(tmp_path / "in.jsonl"))
        for share in (0.1, 0.4, 0.7):
            wait_for_lines(client, batch_id, share * NUM_LINES)
            os.kill(server.pid_of("http_proc"), signal.SIGKILL)
        wait_for_every_line_once(client, batch_id)
        found: Any = client.responses.retrieve(kept.id)
        assert found.output_text == kept.output_text


@pytest.mark.skipif(bool(NO_POWER_CUTS), reason=NO_POWER_CUTS or "-")
@pytest.mark.timeout(300)
def test_a_batch_and_streams_survive_power_cuts(llama_dir: Path, tmp_path: Path) -> None:
    print(PowerCuts(tmp_path, llama_dir, NUM_LINES, 10).run(2, random.Random(0)))
