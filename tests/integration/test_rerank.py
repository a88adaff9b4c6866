"""Scores of a whole server: those of transformers, and the same after deaths of its processes."""

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest
import torch
from huggingface_hub import InferenceClient
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedTokenizerFast,
)

from quadriga import LLM, AsyncClient, Client, Pooling
from quadriga.errors import InvalidRequest
from tests.gateway import running_gateway
from tests.server import running_server
from tests.tiny_encoders import CLASSIFIERS
from tests.tiny_models import SENTENCES
from tests.tiny_rankers import qwen3_reranker

pytestmark = pytest.mark.timeout(180)

FLAGS = ("--dtype", "float32", "--worker-threads", "1")
QUERY = "Who has four horses?"
TEXTS = ["", "a", "👋🏽 你好", *SENTENCES, *(f"{SENTENCES[0]} {number}" for number in range(40))]
MAX_ERROR = 2e-5


def expected(directory: Path, pairs: list[tuple[str, str]]) -> list[list[float]]:
    """Return transformers' logits of pairs."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(directory / "tokenizer.json"))
    model = AutoModelForSequenceClassification.from_pretrained(directory, dtype=torch.float32)
    logits = []
    for first, second in pairs:
        pair = tokenizer([first], [second], return_tensors="pt", return_token_type_ids=True)
        with torch.inference_mode():
            logits.append(model.eval()(**pair).logits[0].tolist())
    return logits


async def checked_scores(endpoint: str, directory: Path) -> None:
    """Compare scores, alone and while each of the four processes is killed."""
    async with AsyncClient(endpoint) as client:
        scores = await client.score(QUERY, TEXTS)
        logits = expected(directory, [(QUERY, text) for text in TEXTS])
        errors = [abs(a.score - b[0]) for a, b in zip(scores, logits, strict=True)]
        print(f"the largest error of {len(scores)} pairs is {max(errors):.1e}")
        assert max(errors) < MAX_ERROR
        assert await client.score(QUERY, TEXTS[4]) == [scores[4]]
        ranked = await client.rerank(QUERY, TEXTS, top_n=5)
        assert ranked[0].score == max(each.score for each in scores)
        assert [each.text for each in ranked] == [TEXTS[each.index] for each in ranked]
        for name in ("worker_proc", "scheduler_proc", "detok_proc", "tokenizer_proc"):
            pid = (await client.info())["pids"][name]
            task = asyncio.ensure_future(client.score(QUERY, TEXTS))
            await asyncio.sleep(0)
            os.kill(pid, signal.SIGKILL)
            assert await task == scores


def test_a_cross_encoder_gives_the_scores_of_transformers_alone_and_after_kills(
    tmp_path: Path,
) -> None:
    directory = CLASSIFIERS["bert"](tmp_path / "model")
    with running_server(tmp_path / "log", "--model", str(directory), *FLAGS) as server:
        asyncio.run(checked_scores(server.endpoint, directory))


def test_a_classifier_gives_the_labels_of_transformers_and_names_what_it_does_not_do(
    tmp_path: Path,
) -> None:
    directory = CLASSIFIERS["roberta"](tmp_path / "model")
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(directory / "tokenizer.json"))
    model = AutoModelForSequenceClassification.from_pretrained(directory, dtype=torch.float32)
    with LLM(str(directory), dtype="float32", worker_threads=1) as llm:
        # transformers does not count a token of padding, whose id unknown words have here.
        encoded = {text: tokenizer(text)["input_ids"] for text in TEXTS}
        texts = [text for text, ids in encoded.items() if model.config.pad_token_id not in ids]
        found = llm.classify(texts)
        assert len(found) > 10
        assert llm.classify(texts[4]) == found[4]
        assert llm.classify([]) == []
        for text, labels in zip(texts, found, strict=True):
            with torch.inference_mode():
                logits = model.eval()(torch.tensor([encoded[text]])).logits[0]
            probs = dict(zip(model.config.label2id, logits.softmax(-1).tolist(), strict=True))
            assert labels.probs == pytest.approx(probs, abs=MAX_ERROR)
            assert labels.label == max(probs, key=probs.__getitem__)
        with pytest.raises(InvalidRequest, match="only a model with one ranks texts"):
            llm.rerank(QUERY, TEXTS)
        with pytest.raises(InvalidRequest, match="makes neither text nor embeddings"):
            llm.embed("a")
        with pytest.raises(InvalidRequest, match="makes neither text nor embeddings"):
            llm.generate("a")


def qwen3_scores(directory: Path, prompts: list[list[int]], yes: int, no: int) -> list[float]:
    """Return transformers' probability of yes against no after each prompt."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    scores = []
    for prompt in prompts:
        with torch.inference_mode():
            logits = model(torch.tensor([prompt])).logits[0, -1, [yes, no]]
        scores.append(float(logits.softmax(-1)[0]))
    return scores


def test_a_reranker_that_makes_text_scores_by_yes_and_no_with_and_without_the_cache(
    tmp_path: Path,
) -> None:
    directory = qwen3_reranker(tmp_path / "Qwen3-Reranker-tiny")
    flags = ("--model", str(directory), *FLAGS)
    with running_server(tmp_path / "log", *flags) as server, Client(server.endpoint) as client:
        first = client.score(QUERY, TEXTS)
        again = client.score(QUERY, TEXTS)
        assert again == first
        client.flush_cache()
        assert client.score(QUERY, TEXTS[5]) == [first[5]]
        form = (
            "<|im_start|>system\nJudge whether the Document meets the requirements based on the"
            ' Query and the Instruct provided. Note that the answer can only be "yes" or "no".'
            "<|im_end|>\n<|im_start|>user\n<Instruct>: {}\n<Query>: {}\n<Document>: {}<|im_end|>\n"
            "<|im_start|>assistant\n<think>\n\n</think>\n\n"
        )
        task = "Given a web search query, retrieve relevant passages that answer the query"
        prompts = [client.tokenize(form.format(task, QUERY, text)) for text in TEXTS]
        (yes,), (no,) = client.tokenize("yes"), client.tokenize("no")
        scores = qwen3_scores(directory, prompts, yes, no)
        errors = [abs(one.score - other) for one, other in zip(first, scores, strict=True)]
        print(f"the largest error of {len(errors)} pairs is {max(errors):.1e}")
        assert max(errors) < MAX_ERROR
        assert len(set(scores)) > 40
        other = Pooling("score", instruction="Find dogs.")
        assert client.score(QUERY, TEXTS[5], other)[0].score != first[5].score
        assert client.generate(QUERY).token_ids


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Yield the URL of a gateway whose model is a reranker with the fields of BGE's."""
    directory = CLASSIFIERS["xlm-roberta"](tmp_path_factory.mktemp("ranker") / "model")
    log = tmp_path_factory.mktemp("log") / "log"
    with (
        running_server(log, "--model", str(directory), *FLAGS, "--no-http") as server,
        running_gateway(server.endpoint, directory) as address,
    ):
        yield address


def test_the_hubs_client_reads_scores_and_embeddings_are_refused(url: str) -> None:
    client = InferenceClient()
    label = client.text_classification("What a day!", model=f"{url}/predict")
    assert "LABEL_0" in str(label)

    async def refused() -> None:
        async with aiohttp.ClientSession(url) as session:
            for path, body in (
                ("/v1/embeddings", {"input": "a"}),
                ("/v1/completions", {"prompt": "a", "model": "tiny"}),
            ):
                async with session.post(path, json=body) as answer:
                    assert answer.status == 400
                    assert "use /rerank, /score or /classify" in await answer.text()

    asyncio.run(refused())
