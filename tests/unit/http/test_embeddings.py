"""Vectors of texts over HTTP, in each API's format."""

import base64
import struct
from typing import Any

import pytest

from http_proc.apis.embeddings import MAX_TEXTS
from http_proc.generation.vectors import MAX_AT_ONCE
from quadriga.errors import InvalidRequest
from quadriga.sampling.pooling import Pooling
from tests.unit.http.calls import send
from tests.unit.scripted_ring import gateway_before, openai_before
from tests.unit.vector_ring import VectorRing


async def test_openais_client_reads_numbers_and_base64() -> None:
    ring = VectorRing()
    async with openai_before(ring) as (client, _):
        answer = await client.embeddings.create(
            model="tiny", input=["a", "abc", "ab"], dimensions=3, encoding_format="float"
        )
        assert [one.embedding[0] for one in answer.data] == [1.0, 3.0, 2.0]
        assert [one.index for one in answer.data] == [0, 1, 2]
        assert answer.usage.prompt_tokens == answer.usage.total_tokens == 6
        by_default = await client.embeddings.create(model="tiny", input="abcd")
        assert by_default.data[0].embedding == [4.0, -1.5, 0.25]
        ids = await client.embeddings.create(model="tiny", input=[[1, 2], [3]])
        assert [one.embedding[0] for one in ids.data] == [2.0, 1.0]
    assert ring.submitted[0][1].pooling == Pooling(dimensions=3)


async def test_many_texts_are_in_the_server_a_few_at_a_time_and_come_back_in_order() -> None:
    ring = VectorRing()
    async with gateway_before(ring) as (_, gateway):
        texts = ["x" * (number % 50 + 1) for number in range(300)]
        answer = await send(gateway, "/v1/embeddings", {"input": texts})
        assert answer.status == 200
        assert [one["embedding"][0] for one in answer.body["data"]] == list(map(len, texts))
    assert ring.most_open == MAX_AT_ONCE


async def test_other_apis_have_their_own_formats() -> None:
    ring = VectorRing()
    async with gateway_before(ring) as (_, gateway):
        answer = await send(gateway, "/embed", {"inputs": ["ab", "c"], "normalize": False})
        assert answer.body == [[2.0, -1.5, 0.25], [1.0, -1.5, 0.25]]
        body: dict[str, Any] = {
            "texts": ["ab"], "input_type": "search_query", "output_dimension": 3,
            "embedding_types": ["float", "base64", "int8", "uint8", "binary", "ubinary"],
        }  # fmt: skip
        answer = await send(gateway, "/v2/embed", body)
        vectors = answer.body["embeddings"]
        assert vectors["float"] == [[2.0, -1.5, 0.25]]
        assert struct.unpack("<3f", base64.b64decode(vectors["base64"][0])) == (2.0, -1.5, 0.25)
        assert vectors["int8"] == [[127, -127, 32]]
        assert vectors["uint8"] == [[255, 1, 160]]
        assert vectors["ubinary"] == [[0b10100000]]
        assert vectors["binary"] == [[0b10100000 - 128]]
        assert answer.body["meta"]["billed_units"]["input_tokens"] == 2
        answer = await send(gateway, "/api/embed", {"model": "tiny:latest", "input": "ab"})
        assert answer.body["embeddings"] == [[2.0, -1.5, 0.25]]
        assert (answer.body["model"], answer.body["prompt_eval_count"]) == ("tiny:latest", 2)
        answer = await send(gateway, "/api/embeddings", {"model": "tiny", "prompt": "abc"})
        assert answer.body == {"embedding": [3.0, -1.5, 0.25]}
    poolings = [params.pooling for _, params, _ in ring.submitted]
    assert poolings[0] == Pooling(normalize=False)
    assert poolings[-1] == Pooling(normalize=False)
    assert [options["truncate_prompt"] for _, _, options in ring.submitted] == [
        False, False, True, True, True,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/v1/embeddings", {}, "give either input or messages"),
        ("/v1/embeddings", {"input": []}, "input is an empty list"),
        ("/v1/embeddings", {"input": ["a", 3]}, "mixes token ids"),
        ("/v1/embeddings", {"input": "a", "model": "other"}, "model 'other' is not served"),
        ("/v1/embeddings", {"input": "a", "truncate_prompt_tokens": 0}, "must be at least 1"),
        ("/v1/embeddings", {"input": "a", "encoding_format": "hex"}, "encoding_format"),
        ("/v1/embeddings", {"input": ["a"] * (MAX_TEXTS + 1)}, f"1 to {MAX_TEXTS}"),
        ("/embed", {"inputs": "a", "truncation_direction": "Left"}, "truncation_direction"),
        ("/v2/embed", {"texts": []}, "texts has 0 texts"),
        ("/v2/embed", {"texts": ["a"], "embedding_types": ["float64"]}, "embedding_types"),
        ("/api/embed", {"input": "a"}, "model"),
    ],
)
async def test_bad_bodies_are_refused_by_name(path: str, body: Any, words: str) -> None:
    async with gateway_before(VectorRing()) as (_, gateway):
        answer = await send(gateway, path, body)
        error = answer.body["error"]
        assert answer.status in (400, 404)
        assert words in (error if isinstance(error, str) else error["message"])


async def test_an_error_of_one_text_ends_the_request_with_the_name_of_its_field() -> None:
    ring = VectorRing()
    ring.error = InvalidRequest("the text is empty", "prompt")
    async with gateway_before(ring) as (_, gateway):
        for path, field, body in (
            ("/v1/embeddings", "input", {"input": ["", "a"]}),
            ("/v2/embed", "texts", {"texts": [""]}),
        ):
            answer = await send(gateway, path, body)
            assert (answer.status, answer.body["error"]["param"]) == (400, field)


async def test_the_models_prompts_are_chosen_by_name_or_by_coheres_type_of_input() -> None:
    ring = VectorRing()
    ring.facts = {**ring.facts, "prompts": ["query", "passage", "clustering"]}
    async with gateway_before(ring) as (_, gateway):
        await send(gateway, "/v1/embeddings", {"input": "a", "prompt_name": "query"})
        await send(gateway, "/embed", {"inputs": "a", "prompt_name": "query"})
        for kind in ("search_query", "search_document", "clustering", "classification", None):
            await send(gateway, "/v2/embed", {"texts": ["a"], "input_type": kind})
    assert [params.pooling.prompt_name for _, params, _ in ring.submitted] == [
        "query", "query", "query", "passage", "clustering", None, None,
    ]  # fmt: skip
