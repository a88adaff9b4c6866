"""Every field of the requests for numbers, with values of every kind: an answer, or a clear 4xx."""

import itertools
import logging
from typing import Any

import msgspec
import pytest

from http_proc import server
from http_proc.apis.decisions import DECISION_ENDPOINTS
from http_proc.apis.embeddings import EMBEDDING_ENDPOINTS
from http_proc.apis.rerank import RERANK_ENDPOINTS
from tests.unit.http.calls import send
from tests.unit.scripted_ring import ScriptedRing, gateway_before
from tests.unit.vector_ring import ScoreRing, VectorRing
from tests.unit.word_ring import WordRing

PREDICATE = {"type": "predicate", "instructions": "x"}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/embeddings": {"input": "a"},
    "/embed": {"inputs": "a"},
    "/similarity": {"inputs": {"source_sentence": "a", "sentences": ["b"]}},
    "/v2/embed": {"texts": ["a"]},
    "/v1/embed": {"texts": ["a"]},
    "/api/embed": {"model": "tiny", "input": "a"},
    "/api/embeddings": {"model": "tiny", "prompt": "a"},
    "/rerank": {"query": "a", "documents": ["b"]},
    "/score": {"text_1": "a", "text_2": "b"},
    "/classify": {"input": "a"},
    "/predict": {"inputs": "a"},
    "/v1/decisions": {"input": "a", "questions": [PREDICATE]},
    "/v1/systemone": {"state": "a", "questions": {"b": {"type": "noul", "instructions": "c"}}},
}
VALUES: list[Any] = [
    None, True, 0, -1, 10**40, 1.5, "", "x" * 3000, [], [[]], [1, "a"], [[1], "a"], [None],
    [""], [[""]], [["a", "b", "c"]], ["a", "b"], {}, {"a": 1}, {"type": []}, [{"type": "choice"}],
    [{"type": "score", "instructions": "x", "levels": [{}]}], {"b": {"type": "choice"}},
    {"b": {"type": "choice", "criteria": {"": None, "x": 3}}}, {"b": {"type": "noul"}},
    {"b": {"type": "score", "criteria": [{}, []]}}, [{"role": "tool"}], [{"type": "message"}],
    [[[[[[[]]]]]]],
]  # fmt: skip


def ring_of(path: str) -> ScriptedRing:
    """Return what answers a path."""
    if path in {endpoint.path for endpoint in DECISION_ENDPOINTS}:
        return WordRing()
    is_embedding = path in {endpoint.path for endpoint in EMBEDDING_ENDPOINTS}
    return VectorRing() if is_embedding else ScoreRing("a", "b")


def fields_of(path: str) -> list[str]:
    """Return the names of a body's fields."""
    (endpoint,) = [each for each in server.ENDPOINTS if each.path == path]
    return [field.encode_name for field in msgspec.structs.fields(endpoint.body)]


def test_every_function_is_here() -> None:
    endpoints = [*DECISION_ENDPOINTS, *EMBEDDING_ENDPOINTS, *RERANK_ENDPOINTS]
    tested = {endpoint.handler for endpoint in endpoints if endpoint.path in BODIES}
    assert {endpoint.handler for endpoint in endpoints if endpoint.body} == tested


@pytest.mark.parametrize("path", BODIES)
async def test_a_wrong_value_of_any_field_is_refused_with_its_name(
    path: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    wrong = []
    async with gateway_before(ring_of(path)) as (_, gateway):
        assert (await send(gateway, path, BODIES[path])).status == 200
        for name, value in itertools.product([*fields_of(path), "unknown_field"], VALUES):
            if name == "receipt" and value is True:
                continue  # the ring makes none
            answer = await send(gateway, path, BODIES[path] | {name: value})
            if answer.status == 200:
                continue
            error = answer.body["error"]
            message = error if isinstance(error, str) else error["message"]
            if answer.status not in (400, 404) or name not in message:
                wrong.append((name, value, answer.status, message))
        for name in BODIES[path]:
            body = {key: value for key, value in BODIES[path].items() if key != name}
            answer = await send(gateway, path, body)
            if answer.status != 400 or name not in answer.text:
                wrong.append((name, "absent", answer.status, answer.text))
    assert not wrong
    assert not caplog.records
