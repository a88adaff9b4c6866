"""Scores of a whole server: those of transformers, and the same after deaths of the worker."""

import asyncio
import os
import signal
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification, PreTrainedTokenizerFast

from quadriga import AsyncClient, Pooling, SamplingParams
from tests.server import running_server
from tests.tiny_encoders import CLASSIFIERS
from tests.tiny_models import SENTENCES

pytestmark = pytest.mark.timeout(180)

FLAGS = ("--dtype", "float32", "--worker-threads", "1", "--no-http")
QUERY = "Who has four horses?"
TEXTS = ["", "a", "👋🏽 你好", *SENTENCES, *(f"{SENTENCES[0]} {number}" for number in range(40))]
MAX_ERROR = 2e-5


def expected(directory: Path) -> list[float]:
    """Return transformers' logit of the query with each text."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(directory / "tokenizer.json"))
    model = AutoModelForSequenceClassification.from_pretrained(directory, dtype=torch.float32)
    logits = []
    for text in TEXTS:
        pair = tokenizer([QUERY], [text], return_tensors="pt", return_token_type_ids=True)
        with torch.inference_mode():
            logits.append(float(model.eval()(**pair).logits[0, 0]))
    return logits


async def scores_of(client: AsyncClient) -> list[float]:
    """Return the server's scores of the query with each text."""
    params = [SamplingParams(pooling=Pooling("classify", text_pair=text)) for text in TEXTS]
    completions = await client.generate([QUERY] * len(TEXTS), params)
    vectors = [completion.vector for completion in completions]
    assert all(vector is not None and len(vector) == 1 for vector in vectors)
    return [vector[0] for vector in vectors if vector is not None]


async def checked_scores(endpoint: str, directory: Path) -> None:
    """Compare scores, alone and while the worker is killed."""
    async with AsyncClient(endpoint) as client:
        scores = await scores_of(client)
        errors = [abs(a - b) for a, b in zip(scores, expected(directory), strict=True)]
        print(f"the largest error of {len(scores)} pairs is {max(errors):.1e}")
        assert max(errors) < MAX_ERROR
        params = SamplingParams(pooling=Pooling("classify", text_pair=TEXTS[4]))
        alone = (await client.generate(QUERY, params)).vector
        assert alone is not None
        assert alone[0] == scores[4]
        for _ in range(2):
            pid = (await client.info())["pids"]["worker_proc"]
            task = asyncio.ensure_future(scores_of(client))
            await asyncio.sleep(0)
            os.kill(pid, signal.SIGKILL)
            assert await task == scores


def test_a_cross_encoder_gives_the_scores_of_transformers_alone_and_after_kills(
    tmp_path: Path,
) -> None:
    directory = CLASSIFIERS["bert"](tmp_path / "model")
    flags = ("--model", str(directory), *FLAGS)
    with running_server(tmp_path / "log", *flags) as server:
        asyncio.run(checked_scores(server.endpoint, directory))
