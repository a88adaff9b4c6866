"""Embeddings of a whole server: those of transformers, and the same after deaths of the worker."""

import asyncio
import os
import signal
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from transformers import AutoModel, PreTrainedTokenizerFast

from quadriga import AsyncClient, Client, SamplingParams, TextEmbedding
from quadriga.errors import InvalidRequest
from quadriga.sampling.pooling import MEAN, Pooling
from tests.server import running_server
from tests.tiny_encoders import CONTEXT_LENGTH, tiny_bert, tiny_embedding_gemma
from tests.tiny_models import SENTENCES, tiny_llama
from tests.tiny_modules import write_json, write_modules

pytestmark = pytest.mark.timeout(180)

FLAGS = ("--dtype", "float32", "--worker-threads", "1", "--no-http")
GREEDY = SamplingParams(temperature=0, max_tokens=24)
TEXTS = [
    "",
    "a",
    "   ",
    "👋🏽 你好",
    *SENTENCES,
    *(" ".join(SENTENCES[:2]) + str(n) for n in range(40)),
]


def expected(directory: Path, texts: list[str]) -> npt.NDArray[np.float32]:
    """Return the mean of the last hidden states of each text, normalized."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(directory / "tokenizer.json"))
    model = AutoModel.from_pretrained(directory, dtype=torch.float32).eval()
    vectors = []
    for text in texts:
        ids = torch.tensor([tokenizer(text)["input_ids"]])
        with torch.inference_mode():
            mean = model(ids).last_hidden_state[0].mean(0)
        vectors.append((mean / mean.norm()).numpy())
    return np.array(vectors)


def test_an_encoder_gives_the_vectors_of_transformers_alone_and_after_kills(tmp_path: Path) -> None:
    directory = tiny_bert(tmp_path / "model")
    flags = ("--model", str(directory), *FLAGS)
    with running_server(tmp_path / "log", *flags) as server:
        with Client(server.endpoint) as client:
            embeddings = client.embed(TEXTS)
            vectors = np.array([each.vector for each in embeddings])
            assert (vectors * expected(directory, TEXTS)).sum(1).min() > 0.9999
            assert [client.embed(text).vector for text in TEXTS[:8]] == [
                each.vector for each in embeddings[:8]
            ]
            too_long = " ".join(["dog"] * (2 * CONTEXT_LENGTH))
            with pytest.raises(InvalidRequest, match=f"the model's context is {CONTEXT_LENGTH}"):
                client.embed(too_long)
            assert client.embed(too_long, truncate_prompt=True).num_tokens == CONTEXT_LENGTH
            with pytest.raises(InvalidRequest, match="encoder"):
                client.generate("Hello")
            with pytest.raises(InvalidRequest, match="encoder"):
                client.embed("a", Pooling("logprobs", token_ids=[5]))
        for again in asyncio.run(embedded_through_kills(server.endpoint)):
            assert [each.vector for each in again] == [each.vector for each in embeddings]


async def embedded_through_kills(endpoint: str) -> list[list[TextEmbedding]]:
    """Embed the texts twice, and kill the worker each time while it computes them."""
    rounds = []
    async with AsyncClient(endpoint) as client:
        for _ in range(2):
            pid = (await client.info())["pids"]["worker_proc"]
            task = asyncio.ensure_future(client.embed(TEXTS))
            await asyncio.sleep(0)
            os.kill(pid, signal.SIGKILL)
            rounds.append(await task)
        rounds.append(await client.embed(TEXTS))
    return rounds


def test_a_decoder_chats_and_embeds_at_one_time(tmp_path: Path) -> None:
    directory = tiny_llama(tmp_path / "model")
    flags = ("--model", str(directory), "--pooling", MEAN, *FLAGS)
    with running_server(tmp_path / "log", *flags) as server, Client(server.endpoint) as client:
        text = client.generate("Four horses", GREEDY).text
        first = client.embed(SENTENCES)

        async def both() -> None:
            async with AsyncClient(server.endpoint) as other:
                generated, embedded = await asyncio.gather(
                    asyncio.gather(*(other.generate("Four horses", GREEDY) for _ in range(4))),
                    other.embed(SENTENCES * 5),
                )
            assert {each.text for each in generated} == {text}
            assert [each.vector for each in embedded] == [each.vector for each in first] * 5

        asyncio.run(both())


def test_a_bidirectional_gemma_with_dense_modules_is_an_encoder(tmp_path: Path) -> None:
    directory = tiny_embedding_gemma(tmp_path / "model")
    write_modules(directory, [{"in_features": 48, "out_features": 100, "bias": False}])
    query = "task: search result | query: "
    write_json(directory / "config_sentence_transformers.json", {"prompts": {"query": query}})
    flags = ("--model", str(directory), *FLAGS)
    with running_server(tmp_path / "log", *flags) as server, Client(server.endpoint) as client:
        embeddings = client.embed(TEXTS)
        alone = [client.embed(text).vector for text in TEXTS[:8]]
        assert alone == [each.vector for each in embeddings[:8]]
        assert {len(each.vector) for each in embeddings} == {100}
        asked = client.embed("a", Pooling(prompt_name="query", dimensions=64))
        assert asked.vector == client.embed(query + "a", Pooling(dimensions=64)).vector
        with pytest.raises(InvalidRequest, match="vectors of this model have 100 elements"):
            client.embed("a", Pooling(dimensions=101))
        with pytest.raises(InvalidRequest, match="the model is an encoder"):
            client.generate("Hello")
