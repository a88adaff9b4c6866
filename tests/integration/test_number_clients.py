"""Unmodified clients ask for vectors, ranks and decisions, of one model that gives all of them."""

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from huggingface_hub import InferenceClient

from tests.gateway import MODEL, running_gateway
from tests.server import running_server
from tests.tiny_rankers import qwen3_reranker

pytestmark = pytest.mark.timeout(120)

TEXTS = ["Four horses draw the chariot.", "The quick brown fox jumps.", "A token is a word."]
QUERY = "What draws the chariot?"
COMES_WITH = "comes with pip install -e '.[clients]'"


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    directory = qwen3_reranker(tmp_path_factory.mktemp("model") / "Qwen3-Reranker-tiny")
    log = tmp_path_factory.mktemp("log") / "log"
    flags = ("--model", str(directory), "--dtype", "float32", "--worker-threads", "1")
    with (
        running_server(log, *flags, "--pooling", "mean") as server,
        running_gateway(server.endpoint, directory) as address,
    ):
        yield address


@pytest.fixture(scope="module")
def vectors(url: str) -> list[list[float]]:
    """Return the vectors of TEXTS, by OpenAI's client, which asks for base64 by default."""
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
    answer = client.embeddings.create(model=MODEL, input=TEXTS)
    return [one.embedding for one in answer.data]


def cosine(one: list[float], other: list[float]) -> float:
    return sum(a * b for a, b in zip(one, other, strict=True))


def test_openais_client_has_vectors_and_decisions(url: str, vectors: list[list[float]]) -> None:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
    alone = client.embeddings.create(model=MODEL, input=TEXTS[1], encoding_format="float")
    assert alone.data[0].embedding == pytest.approx(vectors[1], abs=1e-7)
    short = client.embeddings.create(model=MODEL, input=TEXTS[1], dimensions=8)
    assert cosine(short.data[0].embedding, short.data[0].embedding) == pytest.approx(1)
    questions: Any = [{"type": "predicate", "instructions": "It is about horses."}]
    decision = client.decisions.create(model=MODEL, input=TEXTS[0], questions=questions)
    (answer,) = decision.answers
    assert 0 < answer.probability < 1  # type: ignore[union-attr]
    with pytest.raises(openai.BadRequestError, match="questions is empty"):
        client.decisions.create(model=MODEL, input="a", questions=[])


def test_the_hubs_client_takes_the_address_of_the_server(
    url: str, vectors: list[list[float]]
) -> None:
    for address in (url, f"{url}/embed"):
        client = InferenceClient(address)
        assert client.feature_extraction(TEXTS[0])[0].tolist() == pytest.approx(vectors[0])
    client = InferenceClient(url)
    similar = client.sentence_similarity(TEXTS[0], other_sentences=TEXTS[1:])
    assert similar == pytest.approx([cosine(vectors[0], other) for other in vectors[1:]])


def test_coheres_clients_have_vectors_and_ranks(url: str, vectors: list[list[float]]) -> None:
    cohere = pytest.importorskip("cohere", reason=f"cohere {COMES_WITH}")
    client = cohere.ClientV2("none", base_url=url)
    answer = client.embed(
        texts=TEXTS, model=MODEL, input_type="search_document", embedding_types=["float", "int8"]
    )
    assert answer.embeddings.float_[2] == pytest.approx(vectors[2], abs=1e-7)
    assert len(answer.embeddings.int8) == len(TEXTS)
    older = cohere.Client("none", base_url=url)
    answer = older.embed(texts=TEXTS, model=MODEL, input_type="search_document")
    assert answer.embeddings[2] == pytest.approx(vectors[2], abs=1e-7)
    ranked = client.rerank(model=MODEL, query=QUERY, documents=TEXTS, top_n=2)
    again = older.rerank(model=MODEL, query=QUERY, documents=TEXTS, top_n=2)
    scores = [(each.index, each.relevance_score) for each in ranked.results]
    assert scores == [(each.index, each.relevance_score) for each in again.results]
    assert len(scores) == 2 and scores[0][1] >= scores[1][1]


def test_ollamas_client_has_vectors(url: str, vectors: list[list[float]]) -> None:
    ollama = pytest.importorskip("ollama", reason=f"ollama {COMES_WITH}")
    client = ollama.Client(url)
    answer = client.embed(f"{MODEL}:latest", TEXTS, dimensions=len(vectors[0]))
    assert answer.embeddings[1] == pytest.approx(vectors[1], abs=1e-7)
    older = list(client.embeddings(MODEL, TEXTS[0]).embedding)
    assert cosine(older, vectors[0]) == pytest.approx(cosine(older, older) ** 0.5)


def test_langchain_has_vectors(url: str, vectors: list[list[float]]) -> None:
    langchain = pytest.importorskip("langchain_openai", reason=f"langchain-openai {COMES_WITH}")
    client = langchain.OpenAIEmbeddings(
        model=MODEL, base_url=f"{url}/v1", api_key="none", check_embedding_ctx_length=False
    )
    assert client.embed_query(TEXTS[0]) == pytest.approx(vectors[0], abs=1e-7)
    assert client.embed_documents(TEXTS)[2] == pytest.approx(vectors[2], abs=1e-7)


def test_system_ones_client_has_decisions(url: str) -> None:
    sdk = pytest.importorskip("typesafe_sdk", reason=f"typesafe-sdk {COMES_WITH}")
    with sdk.TypeSafeClient(api_key="none", base_url=url, model=MODEL) as client:
        answer = client.system_one(
            state={"text": TEXTS[0]},
            questions={
                "horses": sdk.Noul(instructions="Is it about horses?"),
                "what": sdk.Choice(criteria={"horses": None, "a fox": "It jumps."}),
                "speed": sdk.Score(instructions="How fast?", criteria=["slow", "fast"]),
                "only": sdk.Choice(criteria={"horses": None}),
            },
        )
        assert [model.name for model in client.models.list().models] == [MODEL]
    assert 0 < answer.nouls["horses"].noul < 1
    assert answer.choices["what"].choice in ("horses", "a fox")
    assert sum(answer.scores["speed"].probabilities.values()) == pytest.approx(1)
    assert answer.choices["only"].confidence == 1
