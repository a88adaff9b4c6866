"""Vectors of texts over HTTP, in each API's format."""

import asyncio
import base64
import logging
import struct
from typing import Any

import pytest

from http_proc.apis.embeddings import MAX_TEXTS
from http_proc.generation.vectors import MAX_AT_ONCE
from quadriga.errors import InvalidRequest
from quadriga.sampling.pooling import Pooling
from tests.unit.http.calls import send
from tests.unit.scripted_ring import gateway_before, openai_before
from tests.unit.vector_ring import ScoreRing, VectorRing


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


async def test_a_gateway_that_stops_answers_the_later_texts_of_a_call() -> None:
    ring = VectorRing()
    async with gateway_before(ring) as (_, gateway):
        texts = ["x"] * (3 * MAX_AT_ONCE)
        asking = asyncio.create_task(send(gateway, "/v1/embeddings", {"input": texts}))
        while not ring.submitted:
            await asyncio.sleep(0)
        await gateway.drain(0.0)
        assert len(ring.submitted) == len(texts)
        answer = await asking
        assert (answer.status, len(answer.body["data"])) == (200, len(texts))


async def test_what_is_observed_of_a_call_counts_all_of_its_texts(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    texts = ["ab"] * 100
    ring = VectorRing()
    async with gateway_before(ring, log_requests=True) as (_, gateway):
        await send(gateway, "/v1/embeddings", {"input": texts})
        (recent,) = (await send(gateway, "/v1/requests")).body["data"]
        ring.facts = {**ring.facts, "ready": False}
        metrics = (await send(gateway, "/metrics")).text
    assert (recent["vectors"], recent["prompt_tokens"], recent["generated_tokens"]) == (100, 200, 0)
    assert (recent["queue_s"], recent["prefill_s"]) == (0.75, 0.5)
    assert recent["decode_s"] is recent["first_token_s"] is None
    (line,) = [text for text in caplog.messages if "/v1/embeddings" in text]
    assert line.endswith("100 vectors · prompt 200 tokens, 0 cached")
    assert 'http_vectors_total{model_name="tiny"} 100.0' in metrics
    for name, count in (
        ("request_queue_time_seconds", 100),
        ("request_inference_time_seconds", 100),
        ("time_to_first_token_seconds", 0),
        ("request_generation_tokens", 0),
    ):
        assert f'quadriga:{name}_count{{model_name="tiny"}} {float(count)}' in metrics


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
        ("/v1/embeddings", {"input": ["a"] * (MAX_TEXTS + 1)}, f"at most {MAX_TEXTS}"),
        ("/embed", {"inputs": "a", "truncation_direction": "Left"}, "truncation_direction"),
        ("/v2/embed", {"texts": []}, "texts is empty"),
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


async def test_an_error_of_one_text_ends_the_request_with_the_name_of_its_place() -> None:
    ring = VectorRing()
    ring.error = InvalidRequest("the text is empty", "prompt")
    async with gateway_before(ring) as (_, gateway):
        for path, field, body, message in (
            ("/v1/embeddings", "input", {"input": ["", "a"]}, "input[0]: the text is empty"),
            ("/v2/embed", "texts", {"texts": [""]}, "the text is empty"),
        ):
            answer = await send(gateway, path, body)
            assert (answer.status, answer.body["error"]["param"]) == (400, field)
            assert answer.body["error"]["message"] == message
        ring.error = InvalidRequest("prompt_token_ids holds -1: …", "prompt_token_ids")
        answer = await send(gateway, "/v1/embeddings", {"input": [[-1], [2]]})
        assert answer.body["error"]["message"] == "input[0] holds -1: …"
        ring.error = InvalidRequest("dimensions is 9: ask for 1 to 3", "dimensions")
        answer = await send(gateway, "/v1/embeddings", {"input": ["a", "b"], "dimensions": 9})
        assert answer.body["error"]["message"] == "dimensions is 9: ask for 1 to 3"


async def test_a_text_is_compared_with_others() -> None:
    body = {"inputs": {"source_sentence": "ab", "sentences": ["c", "def"]}}
    expected = [2 * length + 1.5 * 1.5 + 0.25 * 0.25 for length in (1, 3)]
    async with gateway_before(VectorRing()) as (_, gateway):
        for path in ("/similarity", "/"):
            assert (await send(gateway, path, body)).body == expected
        refused = await send(
            gateway, "/similarity", {"inputs": {**body["inputs"], "sentences": []}}
        )
        assert "inputs.sentences is empty" in refused.body["error"]["message"]


async def test_the_address_of_a_server_answers_what_the_hubs_client_sends_there() -> None:
    async with gateway_before(VectorRing()) as (_, gateway):
        assert (await send(gateway, "/", {"inputs": ["ab"]})).body == [[2.0, -1.5, 0.25]]
        assert (await send(gateway, "/", {})).status == 400
    async with gateway_before(ScoreRing("no", "yes")) as (_, gateway):
        (best, _other) = (await send(gateway, "/", {"inputs": "ab"})).body
        assert best == {"label": "yes", "score": 2.5}


async def test_coheres_older_endpoint_has_a_list_of_vectors_unless_types_are_asked_for() -> None:
    async with gateway_before(VectorRing()) as (_, gateway):
        answer = await send(gateway, "/v1/embed", {"texts": ["a", "bc"]})
        assert [vector[0] for vector in answer.body["embeddings"]] == [1.0, 2.0]
        assert answer.body["response_type"] == "embeddings_floats"
        answer = await send(gateway, "/v1/embed", {"texts": ["a"], "embedding_types": ["int8"]})
        assert list(answer.body["embeddings"]) == ["int8"]
        assert answer.body["response_type"] == "embeddings_by_type"


async def test_coheres_inputs_are_parts_of_texts() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "bc"}]
    async with gateway_before(VectorRing()) as (_, gateway):
        answer = await send(gateway, "/v2/embed", {"inputs": [{"content": parts}]})
        assert (answer.body["embeddings"]["float"][0][0], answer.body["texts"]) == (3.0, ["abc"])
        image = {"type": "image_url", "image_url": {"url": "data:"}}
        answer = await send(gateway, "/v2/embed", {"inputs": [{"content": [image]}]})
        assert answer.status == 400 and "it must be one of 'text'" in answer.text
        answer = await send(gateway, "/v2/embed", {"inputs": [], "texts": []})
        assert "give either texts or inputs" in answer.text


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
