"""Answers that are numbers have the same bits alone, in any batch, and after deaths of processes.

The whole matrix is python -m tests.faults.kill_matrix --requests decoder encoder ranker classifier.
"""

import asyncio
import os
import signal
from array import array
from pathlib import Path

import pytest

from quadriga import AsyncClient
from tests.everything import more
from tests.faults.kill_matrix import main
from tests.faults.number_requests import MODELS, QUERY, texts_of
from tests.server import running_server

TEXTS = texts_of(3)[:64]
SOME = (0, 31, 63)
KINDS = ["decoder", more("encoder"), more("ranker"), more("classifier")]


@pytest.mark.parametrize("kind", KINDS)
def test_no_answer_is_lost_or_different_when_the_worker_is_killed(kind: str) -> None:
    flags = ["--rounds", "1", "--signals", "SIGKILL", "--moments", "streams"]
    assert main([*flags, "--processes", "worker_proc", "--requests", kind]) == 0


async def numbers_of(client: AsyncClient, kind: str, texts: list[str]) -> list[bytes]:
    """Return the bytes of all that a model of a kind says of texts."""
    parts: list[list[bytes]] = []
    if kind in ("decoder", "encoder"):
        parts.append([each.vector.tobytes() for each in await client.embed(texts)])
    if kind in ("decoder", "ranker"):
        scores = await client.score(QUERY, texts)
        parts.append([array("d", [each.score]).tobytes() for each in scores])
    if kind == "classifier":
        labels = await client.classify(texts)
        parts.append([array("d", each.probs.values()).tobytes() for each in labels])
    return [b"".join(each) for each in zip(*parts, strict=True)]


async def checked_bits(endpoint: str, kind: str) -> None:
    async with AsyncClient(endpoint) as client:
        batch = await numbers_of(client, kind, TEXTS)
        assert len(set(batch)) > 32, "the texts are different"
        for number in SOME:
            assert await numbers_of(client, kind, TEXTS[number : number + 1]) == [batch[number]]
        assert await numbers_of(client, kind, TEXTS[::-1]) == batch[::-1]
        pid = (await client.info())["pids"]["worker_proc"]
        killed = asyncio.ensure_future(numbers_of(client, kind, TEXTS))
        await asyncio.sleep(0)  # all texts are sent
        os.kill(pid, signal.SIGKILL)
        assert await killed == batch
        assert (await client.info())["pids"]["worker_proc"] != pid


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_has_the_same_bits_alone_in_a_batch_in_another_order_and_after_a_kill(
    kind: str, tmp_path: Path
) -> None:
    model = MODELS[kind]
    flags = ("--model", str(model.make(tmp_path / "model")), *model.flags)
    flags += ("--dtype", "float32", "--worker-threads", "1")
    with running_server(tmp_path / "log", *flags) as server:
        asyncio.run(checked_bits(server.endpoint, kind))
