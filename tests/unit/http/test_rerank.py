"""Ranks, scores and labels over HTTP, in each API's format."""

from typing import Any

import pytest

from http_proc.apis.embeddings import MAX_TEXTS
from quadriga.errors import InvalidRequest, PromptTooLong
from quadriga.sampling.pooling import CLASSIFY, IDENTITY, PROBABILITIES, SCORE, SIGMOID, Pooling
from tests.unit.http.calls import send
from tests.unit.scripted_ring import gateway_before
from tests.unit.vector_ring import ScoreRing

DOCUMENTS = ["bb", "dddd", "a", "cccc"]


def poolings(ring: ScoreRing) -> list[Pooling]:
    return [params.pooling for _, params, _ in ring.submitted]


def options(ring: ScoreRing, number: int) -> dict[str, Any]:
    """Return what a request to the server has beside its prompt and its parameters."""
    names = ("priority", "truncate_prompt")
    return {name: value for name, value in ring.submitted[number][2].items() if name in names}


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
async def test_documents_are_ranked_in_the_format_of_cohere_and_jina(path: str) -> None:
    ring = ScoreRing("LABEL_0")
    async with gateway_before(ring) as (_, gateway):
        body: dict[str, Any] = {"model": "tiny", "query": "q", "documents": DOCUMENTS}
        answer = await send(gateway, path, body)
        assert answer.status == 200
        assert answer.body["results"] == [
            {"index": 1, "relevance_score": 4.0},
            {"index": 3, "relevance_score": 4.0},
            {"index": 0, "relevance_score": 2.0},
            {"index": 2, "relevance_score": 1.0},
        ]
        assert answer.body["usage"]["total_tokens"] == 11
        assert answer.body["meta"]["billed_units"] == {"search_units": 1}
        objects = [{"text": text} for text in DOCUMENTS]
        body |= {
            "documents": objects, "top_n": 1, "return_documents": True, "truncate": False,
            "max_tokens_per_doc": 5, "max_tokens_per_query": 6, "truncate_prompt_tokens": 7,
            "instruction": "match", "use_activation": False, "priority": 3,
        }  # fmt: skip
        answer = await send(gateway, path, body)
        assert answer.body["results"] == [
            {"index": 1, "relevance_score": 4.0, "document": {"text": "dddd"}}
        ]
    first, last = ring.submitted[0], ring.submitted[-1]
    assert [prompt for prompt, _, _ in ring.submitted] == ["q"] * 8
    assert first[1].pooling == Pooling(SCORE, text_pair="bb")
    assert options(ring, 0) == {"priority": 0, "truncate_prompt": True}
    assert last[1].pooling == Pooling(
        SCORE, max_tokens=7, activation=IDENTITY, text_pair="cccc", max_first_tokens=6,
        max_second_tokens=5, instruction="match",
    )  # fmt: skip
    assert options(ring, -1) == {"priority": 3, "truncate_prompt": True}


async def test_documents_can_be_refused_where_they_are_too_long() -> None:
    ring = ScoreRing("LABEL_0")
    async with gateway_before(ring) as (_, gateway):
        await send(gateway, "/rerank", {"query": "q", "documents": ["a"], "truncate": False})
        await send(gateway, "/rerank", {"query": "q", "texts": ["a"]})
        await send(gateway, "/rerank", {"query": "q", "texts": ["a"], "truncate": True})
    assert [options(ring, number)["truncate_prompt"] for number in range(3)] == [False, False, True]


async def test_texts_are_ranked_in_the_format_of_tei() -> None:
    ring = ScoreRing("LABEL_0")
    async with gateway_before(ring) as (_, gateway):
        body: dict[str, Any] = {"query": "q", "texts": DOCUMENTS[:3]}
        answer = await send(gateway, "/rerank", body)
        assert answer.body == [
            {"index": 1, "score": 4.0}, {"index": 0, "score": 2.0}, {"index": 2, "score": 1.0},
        ]  # fmt: skip
        answer = await send(gateway, "/rerank", body | {"raw_scores": True, "return_text": True})
        assert answer.body[0] == {"index": 1, "score": 4.0, "text": "dddd"}
    assert {each.activation for each in poolings(ring)[:3]} == {SIGMOID}
    assert {each.activation for each in poolings(ring)[3:]} == {IDENTITY}


async def test_pairs_are_scored_in_their_order() -> None:
    ring = ScoreRing("LABEL_0")
    async with gateway_before(ring) as (_, gateway):
        for path, body, firsts in (
            ("/score", {"text_1": "q", "text_2": DOCUMENTS}, ["q"] * 4),
            ("/v1/score", {"queries": ["a", "b", "c", "d"], "documents": DOCUMENTS}, list("abcd")),
        ):
            ring.submitted.clear()
            answer = await send(gateway, path, body)
            data = answer.body["data"]
            assert [each["score"] for each in data] == [2.0, 4.0, 1.0, 4.0]
            assert [each["index"] for each in data] == [0, 1, 2, 3]
            assert [prompt for prompt, _, _ in ring.submitted] == firsts
        cut = {"text_1": "q", "text_2": "a", "truncate_prompt_tokens": -1, "use_activation": False}
        answer = await send(gateway, "/score", cut)
        assert answer.body["data"] == [{"index": 0, "score": 1.0, "object": "score"}]
    assert poolings(ring)[-1] == Pooling(SCORE, activation=IDENTITY, text_pair="a")
    assert options(ring, -1) == {"priority": 0, "truncate_prompt": True}


async def test_labels_have_probabilities_in_both_formats() -> None:
    ring = ScoreRing("negative", "positive")
    async with gateway_before(ring) as (_, gateway):
        answer = await send(gateway, "/classify", {"input": ["aa", "b"]})
        assert answer.body["data"] == [
            {"index": 0, "label": "positive", "probs": [2.0, 2.5], "num_classes": 2},
            {"index": 1, "label": "positive", "probs": [1.0, 1.5], "num_classes": 2},
        ]
        one = [{"score": 2.5, "label": "positive"}, {"score": 2.0, "label": "negative"}]
        assert (await send(gateway, "/predict", {"inputs": "aa"})).body == one
        assert (await send(gateway, "/predict", {"inputs": ["x", "aa"]})).body == one
        batch = {"inputs": [["aa"], ["x", "aa"]], "raw_scores": True, "truncate": True}
        assert (await send(gateway, "/predict", batch)).body == [one, one]
        hub = {"inputs": "aa", "parameters": {"function_to_apply": "sigmoid", "top_k": 1}}
        assert (await send(gateway, "/predict", hub)).body == one[:1]
    assert poolings(ring).pop().activation == SIGMOID
    ring.submitted.pop()
    assert poolings(ring)[0] == Pooling(CLASSIFY, activation=PROBABILITIES)
    assert poolings(ring)[3] == Pooling(CLASSIFY, activation=PROBABILITIES, text_pair="aa")
    assert poolings(ring)[-1] == Pooling(CLASSIFY, activation=IDENTITY, text_pair="aa")
    assert options(ring, -1) == {"truncate_prompt": True}


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/rerank", {"query": "q"}, "give either documents or texts"),
        ("/rerank", {"query": "q", "documents": ["a"], "texts": ["a"]}, "give either documents"),
        ("/rerank", {"query": "q", "documents": []}, f"documents is empty: send 1 to {MAX_TEXTS}"),
        ("/rerank", {"query": "q", "texts": []}, "texts is empty"),
        ("/rerank", {"query": "q", "documents": ["a"] * (MAX_TEXTS + 1)}, f"at most {MAX_TEXTS}"),
        ("/rerank", {"query": "q", "documents": ["a"], "top_n": 0}, "top_n is 0"),
        ("/rerank", {"query": "q", "documents": [{"title": "a"}]}, "documents"),
        ("/rerank", {"documents": ["a"]}, "query"),
        ("/v2/rerank", {"query": "q", "documents": ["a"], "model": "other"}, "is not served"),
        ("/score", {"text_1": "a"}, "give text_1 and text_2, or queries and documents"),
        ("/score", {"text_1": ["a", "b"], "text_2": ["a"]}, "text_1 has 2 texts, and text_2 has 1"),
        ("/score", {"text_1": "a", "text_2": []}, "text_2 is empty"),
        ("/classify", {"input": []}, "input is empty"),
        ("/classify", {"input": "a", "truncate_prompt_tokens": 0}, "must be at least 1"),
        ("/predict", {"inputs": ["a", "b", "c"]}, "a list of texts is a list of lists"),
        ("/predict", {"inputs": [["a"], []]}, "inputs[1] is a list of 0 texts"),
        ("/predict", {"inputs": "a", "parameters": {"top_k": 0}}, "top_k is 0"),
        ("/predict", {"inputs": []}, "inputs[0] is a list of 0 texts"),
    ],
)
async def test_bad_bodies_are_refused_by_name(path: str, body: Any, words: str) -> None:
    async with gateway_before(ScoreRing("LABEL_0")) as (_, gateway):
        answer = await send(gateway, path, body)
        assert answer.status in (400, 404)
        assert words in answer.body["error"]["message"]


async def test_what_the_server_refuses_names_the_field_of_the_request() -> None:
    for error, param in (
        (InvalidRequest("the model has no scores", "pooling"), "model"),
        (PromptTooLong("the pair has 900 tokens", "prompt"), "documents"),
        (InvalidRequest("max_second_tokens is 0", "max_second_tokens"), "max_tokens_per_doc"),
    ):
        ring = ScoreRing()
        ring.error = error
        async with gateway_before(ring) as (_, gateway):
            body = {"query": "q", "documents": ["a", "b"]}
            answer = await send(gateway, "/rerank", body)
            assert (answer.status, answer.body["error"]["param"]) == (400, param)
    ring = ScoreRing()
    ring.error = InvalidRequest("the model has no scores", "pooling")
    async with gateway_before(ring) as (_, gateway):
        answer = await send(gateway, "/classify", {"input": "a"})
        assert (answer.status, answer.body["error"]["param"]) == (400, "model")
