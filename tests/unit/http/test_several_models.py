"""A gateway of several models: who answers, what is listed, and what one that is down leaves."""

import asyncio
import json
import os
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest

from http_proc.core.gateway import Gateway
from http_proc.core.served_model import MAX_NAMED_MODELS
from http_proc.web.stream_rows import StreamRows
from quadriga.errors import QuadrigaError, ServerFailed, ServerUnreachable
from tests.unit.http.batch.batch_client import CHAT, Http
from tests.unit.http.calls import key_file, send
from tests.unit.http.measured_ring import MeasuredRing
from tests.unit.http.server_info import info_of
from tests.unit.http.streams.stream_clients import (
    PIECES,
    OpenRing,
    events_of,
    reading,
    streaming,
)
from tests.unit.scripted_ring import ASK, FACTS, ScriptedHandle, ScriptedRing, gateway_before
from tests.unit.vector_ring import ScoreRing, VectorRing

HI: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": HI,
    "/v1/completions": {"prompt": "Hi"},
    "/v1/messages": HI | {"max_tokens": 5},
    "/v1/messages/count_tokens": HI,
    "/v1/responses": {"input": "Hi"},
    "/api/chat": HI | {"stream": False},
    "/api/generate": {"prompt": "Hi", "stream": False},
    "/generate": {"text": "Hi"},
    "/tokenize": {"prompt": "Hi"},
    "/render": {"prompt": "Hi"},
}
NEEDS_A_NAME = ("/api/chat", "/api/generate")


class DownRing(ScriptedRing):
    """A ring whose processes are gone."""

    async def info(self, timeout: float) -> dict[str, Any]:
        raise ServerUnreachable("no answer from ipc:///run/b")

    def submit(self, *prompt: Any, **options: Any) -> ScriptedHandle:
        raise ServerUnreachable("no answer from ipc:///run/b")

    async def flush_cache(self) -> int:
        raise ServerUnreachable("no answer from ipc:///run/b")


class LostRing(ScriptedRing):
    """A ring that is lost while its requests run."""

    def __init__(self) -> None:
        super().__init__(["begin"], leaves_open=True)
        self.reason: QuadrigaError | None = None

    async def give_up(self, error: QuadrigaError) -> None:
        self.reason = error
        for sink in self.sinks:
            sink(error)

    def submit(self, *prompt: Any, **options: Any) -> ScriptedHandle:
        if self.reason is not None:
            raise self.reason
        return super().submit(*prompt, **options)

    async def info(self, timeout: float) -> dict[str, Any]:
        if self.reason is not None:
            raise self.reason
        return await super().info(timeout)


class FlushedRing(ScriptedRing):
    """A ring with pages to free."""

    num_pages = 3

    async def flush_cache(self) -> int:
        self.num_pages, flushed = 0, self.num_pages
        return flushed


class EncoderRing(VectorRing):
    """A ring whose model makes vectors and no text."""

    def __init__(self) -> None:
        super().__init__()
        self.facts = {**FACTS, "chat": False, "encoder": True, "embeddings": True}


def two(**facts: Any) -> dict[str, ScriptedRing]:
    """Return the rings of model a, and of model b with its aliases."""
    return {
        "a": ScriptedRing(["from ", "a"], **facts),
        "b gpt-4o org/b": ScriptedRing(["from ", "b"], **facts),
    }


def counts(rings: Mapping[str, ScriptedRing]) -> list[int]:
    """Return how many requests and questions about texts each ring got."""
    return [len(ring.submitted) for ring in rings.values()]


@pytest.mark.parametrize("path", BODIES)
async def test_the_model_of_a_request_answers_it(path: str) -> None:
    rings = two()
    async with gateway_before(rings) as (_, gateway):
        for name, expected in (("a", [1, 0]), ("b", [1, 1]), ("gpt-4o", [1, 2]), ("org/b", [1, 3])):
            answer = await send(gateway, path, BODIES[path] | {"model": name})
            assert answer.status == 200, answer.text
            assert counts(rings) == expected
            if "from" in answer.text:
                assert f"from {'a' if name == 'a' else 'b'}" in answer.text
            if '"model"' in answer.text and not path.startswith("/api/"):
                assert answer.body["model"] == ("a" if name == "a" else "b")
        answer = await send(gateway, path, BODIES[path])
        if path in NEEDS_A_NAME:
            assert answer.status == 400 and counts(rings) == [1, 3]
        else:
            assert answer.status == 200 and counts(rings) == [2, 3]


@pytest.mark.parametrize("path", BODIES)
async def test_an_unknown_model_is_a_404_that_names_the_models(path: str) -> None:
    rings = two()
    async with gateway_before(rings) as (_, gateway):
        answer = await send(gateway, path, BODIES[path] | {"model": "c"})
        assert answer.status == 404, answer.text
        assert "model 'c' is not served here: use 'a' or 'b'" in answer.text
    assert counts(rings) == [0, 0]


async def test_of_many_models_an_unknown_name_gets_those_with_similar_names() -> None:
    names = [f"model-{letter * 8}" for letter in "abcdefg"]
    assert len(names) > MAX_NAMED_MODELS
    names[0] += " gpt-4o"
    rings = {name: ScriptedRing(["x"]) for name in names}
    async with gateway_before(rings) as (_, gateway):

        async def message(name: str) -> str:
            answer = await send(gateway, "/v1/completions", {"prompt": "x", "model": name})
            assert answer.status == 404 and answer.body["error"]["code"] == "model_not_found"
            return str(answer.body["error"]["message"])

        assert "use 'model-bbbbbbbb'" in await message("model-bbbbbbb")
        assert "use 'gpt-4o'" in await message("gpt-4")
        assert (await message("zzz")).endswith("not served here: GET /v1/models lists what is")
        assert "GET /v1/models" in await message("y" * 100_000)


async def test_embeddings_and_scores_are_made_beside_chats() -> None:
    rings = {"chat": ScriptedRing(["x"]), "vec": VectorRing(), "score": ScoreRing("yes")}
    async with gateway_before(rings) as (_, gateway):
        asked: dict[str, dict[str, Any]] = {
            "/v1/embeddings": {"input": "one", "model": "vec"},
            "/embed": {"inputs": "one", "model": "vec"},
            "/v2/embed": {"texts": ["one"], "model": "vec", "input_type": "search_query"},
            "/api/embed": {"input": "one", "model": "vec:latest"},
            "/v1/rerank": {"query": "q", "documents": ["d"], "model": "score"},
            "/score": {"text_1": "a", "text_2": "b", "model": "score"},
            "/classify": {"input": "a", "model": "score"},
            "/predict": {"inputs": "a", "model": "score"},
            "/v1/chat/completions": HI | {"model": "chat"},
        }
        for path, body in asked.items():
            answer = await send(gateway, path, body)
            assert answer.status == 200, (path, answer.text)
            if isinstance(answer.body, dict) and "model" in answer.body:
                assert answer.body["model"] == body["model"]
    assert counts(rings) == [1, 4, 4]


async def test_a_chat_for_an_encoder_is_refused_and_names_the_models_that_chat() -> None:
    rings = {"vec": EncoderRing(), "chat": ScriptedRing(["x"]), "down": DownRing([])}
    async with gateway_before(rings) as (_, gateway):
        answer = await send(gateway, "/v1/chat/completions", HI)
        assert answer.status == 400 and answer.body["error"]["code"] == "no_chat_template"
        message = answer.body["error"]["message"]
        assert message.startswith("vec has no chat template, it is an encoder")
        assert message.endswith("send texts to /v1/embeddings, or the chat to 'chat'")


async def test_texts_for_a_model_without_vectors_name_the_models_that_make_them() -> None:
    rings = {"chat": ScriptedRing(["x"]), "vec": EncoderRing(), "score": ScoreRing("yes")}
    asked: dict[str, tuple[dict[str, Any], str]] = {
        "/v1/embeddings": ({"input": "one"}, "chat makes no embeddings: use 'vec'"),
        "/v1/rerank": (
            {"query": "q", "documents": ["d"], "model": "vec"},
            "vec scores no pairs: use 'score'",
        ),
    }
    async with gateway_before(rings) as (_, gateway):
        for path, (body, message) in asked.items():
            answer = await send(gateway, path, body)
            assert answer.status == 400 and answer.body["error"]["message"] == message
            assert answer.body["error"]["param"] == "model"
    assert counts(rings) == [0, 0, 0]


async def test_every_model_is_listed_with_its_aliases() -> None:
    rings = two()
    rings["b gpt-4o org/b"].facts["context_length"] = 77
    async with gateway_before(rings) as (_, gateway):
        cards = (await send(gateway, "/v1/models")).body["data"]
        assert [card["id"] for card in cards] == ["a", "b"]
        assert "aliases" not in cards[0] and cards[1]["aliases"] == ["gpt-4o", "org/b"]
        assert [card["max_model_len"] for card in cards] == [100, 77]
        for name in ("b", "gpt-4o", "org/b"):
            assert (await send(gateway, f"/v1/models/{name}")).body == cards[1]
        answer = await send(gateway, "/v1/models/c")
        assert answer.status == 404 and "use 'a' or 'b'" in answer.text
        of_anthropic = (await send(gateway, "/v1/models", anthropic_version="x")).body
        assert [each["id"] for each in of_anthropic["data"]] == ["a", "b"]
        assert (of_anthropic["first_id"], of_anthropic["last_id"]) == ("a", "b")
        for path in ("/api/tags", "/api/ps"):
            listed = (await send(gateway, path)).body["models"]
            assert [model["name"] for model in listed] == ["a:latest", "b:latest"]
        for name in ("b", "b:latest", "gpt-4o:latest"):
            shown = (await send(gateway, "/api/show", {"model": name})).body
            assert shown["model_info"]["llama.context_length"] == 77
        landing = (await send(gateway, "/")).body
        assert landing["model"] == "a" and landing["models"] == ["a", "b"]
        info = (await send(gateway, "/server_info?model=gpt-4o")).body
        assert info["context_length"] == 77
        assert (await send(gateway, "/server_info")).body["context_length"] == 100
        assert (await send(gateway, "/server_info?model=c")).status == 404


async def test_a_single_model_has_no_list_of_models() -> None:
    async with gateway_before(ScriptedRing(["x"])) as (_, gateway):
        await send(gateway, "/v1/completions", {"prompt": "x"})
        for path in ("/", "/server_info", "/v1/requests", "/v1/models"):
            text = (await send(gateway, path)).text
            assert "models" not in text and "aliases" not in text, path
        assert "model" not in (await send(gateway, "/v1/requests")).body["data"][0]


async def test_a_tag_belongs_to_the_name_where_a_model_has_it() -> None:
    rings = {"a:latest": ScriptedRing(["x"]), "a": ScriptedRing(["x"]), "b": ScriptedRing(["x"])}
    async with gateway_before(rings) as (_, gateway):
        for name, expected in (("a", [0, 1, 0]), ("a:latest", [1, 1, 0]), ("b:latest", [1, 1, 1])):
            answer = await send(gateway, "/api/generate", {"prompt": "x", "model": name})
            assert answer.status == 200 and counts(rings) == expected
        missing = await send(gateway, "/api/generate", {"prompt": "x", "model": ""})
        assert "model is missing: use 'a:latest', 'a' or 'b'" in missing.text


async def test_one_model_that_is_down_leaves_the_others() -> None:
    rings = {"a": ScriptedRing(["x"], **info_of()), "b": DownRing([])}
    async with gateway_before(rings) as (_, gateway):
        assert (await send(gateway, "/v1/chat/completions", ASK | {"model": "a"})).status == 200
        for path in ("/v1/chat/completions", "/v1/completions", "/tokenize"):
            body = {"model": "b"} | (HI if "chat" in path else {"prompt": "x"})
            if path != "/tokenize":
                answer = await send(gateway, path, body)
                assert answer.status == 503 and "no answer" in answer.text
        assert [each["id"] for each in (await send(gateway, "/v1/models")).body["data"]] == ["a"]
        assert (await send(gateway, "/v1/models/b")).status == 503
        assert [m["name"] for m in (await send(gateway, "/api/tags")).body["models"]] == [
            "a:latest"
        ]
        ready = await send(gateway, "/readyz")
        assert ready.status == 503 and "b: no answer" in ready.text
        assert (await send(gateway, "/server_info")).status == 200
        assert (await send(gateway, "/server_info?model=b")).status == 503
        assert (await send(gateway, "/livez")).status == 200
        text = (await send(gateway, "/metrics")).text
        assert 'num_requests_running{model_name="a"}' in text
        assert 'num_requests_running{model_name="b"}' not in text
        assert 'http_requests_live{model_name="b"} 0.0' in text
    async with gateway_before({"a": DownRing([]), "b": DownRing([])}) as (_, gateway):
        assert (await send(gateway, "/v1/models")).status == 503
        assert (await send(gateway, "/metrics")).status == 200


async def test_a_lost_model_fails_its_requests_and_leaves_the_others() -> None:
    rings = {"a": ScriptedRing(["x"]), "b": LostRing()}
    async with gateway_before(rings) as (_, gateway):
        body = {"prompt": "x", "model": "b"}
        running = [
            asyncio.create_task(send(gateway, "/v1/completions", body | {"stream": stream}))
            for stream in (True, False)
        ]
        while counts(rings) != [0, 2]:
            await asyncio.sleep(0.01)
        await list(gateway.models)[1].lose(ServerFailed("worker_proc@b died"))
        for task in running:
            assert "worker_proc@b died" in (await task).text
        answer = await send(gateway, "/v1/completions", body)
        assert answer.status == 503 and "worker_proc@b died" in answer.text
        assert (await send(gateway, "/v1/completions", body | {"model": "a"})).status == 200
        assert (await send(gateway, "/readyz")).status == 200
        assert [each["id"] for each in (await send(gateway, "/v1/models")).body["data"]] == ["a"]
        assert (await send(gateway, "/v1/models/b")).status == 503
        await asyncio.wait_for(gateway.until_ready(), 10)


async def test_the_server_is_ready_when_all_models_are() -> None:
    rings = two()
    async with gateway_before(rings) as (_, gateway):
        rings["b gpt-4o org/b"].facts["ready"] = False
        answer = await send(gateway, "/readyz")
        assert answer.status == 503 and "b: the model is being loaded" in answer.text
        rings["b gpt-4o org/b"].facts["ready"] = True
        assert (await send(gateway, "/health")).status == 200
        await asyncio.wait_for(gateway.until_ready(), 10)


async def test_every_metric_is_there_once_with_the_samples_of_each_model() -> None:
    rings = {name: ScriptedRing(["x", "y"], **info_of()) for name in ("a", "b gpt-4o")}
    async with gateway_before(rings) as (_, gateway):
        for name in ("a", "b", "gpt-4o"):
            await send(gateway, "/v1/completions", {"prompt": "x", "model": name})
        await send(gateway, "/v1/completions", {"prompt": "x", "model": "b", "best_of": 9})
        await send(gateway, "/v1/completions", {"prompt": "x", "model": "c"})
        text = (await send(gateway, "/metrics")).text
    kinds = re.findall(r"^# TYPE (\S+)", text, re.M)
    assert len(kinds) == len(set(kinds))
    samples = re.findall(r"^quadriga:(\S+)", text, re.M)
    assert len(samples) == len(set(samples))
    for name in ("num_requests_running", "kv_cache_usage_perc", "generation_tokens_total"):
        assert [f'{name}{{model_name="{each}"}}' in samples for each in "ab"] == [True, True]
    count = "request_generation_tokens_count"
    assert f'quadriga:{count}{{model_name="a"}} 1.0' in text
    assert f'quadriga:{count}{{model_name="b"}} 2.0' in text
    errors = re.findall(r"http_errors_total\{(.*?)\} (\S+)", text)
    assert errors == [
        ('code="model_not_found",model_name="a"', "1.0"),
        ('code="400",model_name="b"', "1.0"),
    ]
    assert 'process_start_time_seconds{process="http_proc"}' in text


async def test_processes_of_a_model_are_named_with_it() -> None:
    pids = {"pids": {"scheduler_proc": os.getpid(), "launcher": os.getpid()}}
    rings = {name: ScriptedRing(["x"], **info_of() | pids) for name in "ab"}
    async with gateway_before(rings) as (_, gateway):
        text = (await send(gateway, "/metrics")).text
    for name in "ab":
        assert f'resident_bytes{{model_name="{name}",process="scheduler_proc"}}' in text
    for name in ("http_proc", "launcher"):
        assert text.count(f'resident_bytes{{process="{name}"}}') == 1
    assert text.count('process="launcher"') == 3


async def test_a_tenant_sees_what_it_has_used_of_each_model(tmp_path: Path) -> None:
    keys = key_file(tmp_path, alice="a-key", bob="b-key")
    used = {"alice": [1.0, 2.0, 3.0, 4.0, 5.0], "bob": [9.0] * 5}
    rings = two(tenants=used)
    async with gateway_before(rings, keys=str(keys)) as (_, gateway):
        alice = {"Authorization": "Bearer a-key"}
        for name in ("a", "b"):
            answer = await send(gateway, "/v1/completions", {"prompt": "x", "model": name}, **alice)
            assert answer.status == 200
        assert (await send(gateway, "/v1/completions", {"prompt": "x"})).status == 401
        text = (await send(gateway, "/metrics", **alice)).text
        assert "bob" not in text
        assert text.count("# TYPE quadriga:tenant_requests_total") == 1
        for name in ("a", "b"):
            assert f'tenant_requests_total{{model_name="{name}",tenant="alice"}} 1.0' in text
        listed = (await send(gateway, "/v1/requests", **alice)).body["data"]
        assert {each["model"] for each in listed} == {"a", "b"}
        bob = {"Authorization": "Bearer b-key"}
        assert (await send(gateway, "/v1/requests", **bob)).body["data"] == []
        info = (await send(gateway, "/server_info?model=b", **alice)).body
        assert info["tenants"] == {"alice": used["alice"]}
    assert [ring.tenants for ring in rings.values()] == [["alice"], ["alice"]]


async def test_the_cache_of_one_model_or_of_all_is_flushed() -> None:
    rings: dict[str, ScriptedRing] = {"a": FlushedRing([]), "b": FlushedRing([])}
    async with gateway_before(rings) as (_, gateway):
        assert (await send(gateway, "/flush_cache?model=c", None, "POST")).status == 404
        assert (await send(gateway, "/flush_cache?model=b", None, "POST")).body == {
            "flushed_pages": 3
        }
        assert (await send(gateway, "/flush_cache", None, "POST")).body == {"flushed_pages": 3}
        assert (await send(gateway, "/flush_cache", None, "POST")).body == {"flushed_pages": 0}
    rings = {"a": DownRing([]), "b": FlushedRing([])}
    async with gateway_before(rings) as (_, gateway):
        assert (await send(gateway, "/flush_cache", None, "POST")).status == 503
        assert rings["b"].num_pages == 0  # type: ignore[attr-defined]


async def test_a_simulation_has_the_load_and_the_flags_of_its_model() -> None:
    rings = {name: MeasuredRing() for name in "abc"}
    async with gateway_before(rings) as (_, gateway):
        for name in ("a", "b", "b"):
            await send(gateway, "/v1/completions", {"prompt": "x", "model": name})
        for query, expected in (("", 1), ("?model=a", 1), ("?model=b", 2), ("?model=c", 0)):
            assert (await send(gateway, f"/v1/what_if{query}")).body["num_choices"] == expected
        for query, status in (("?model=c", 409), ("?model=d", 404)):
            assert (await send(gateway, f"/v1/what_if{query}", {"last_s": 60})).status == status


async def test_the_live_feed_is_that_of_one_model() -> None:
    rings = two()
    async with gateway_before(rings) as (url, gateway), aiohttp.ClientSession() as session:
        for query, expected in (("", [1, 0]), ("?model=gpt-4o", [1, 1]), ("?model=b", [1, 2])):
            async with session.get(f"{url}/v1/live{query}") as response:
                assert (await response.content.readline()).startswith(b"event: history")
                while [ring.num_watches for ring in rings.values()] != expected:
                    await asyncio.sleep(0.01)
        assert (await send(gateway, "/v1/live?model=c")).status == 404


async def test_an_abort_reaches_the_model_of_its_request() -> None:
    rings = {name: ScriptedRing(["x"], leaves_open=True) for name in ("a", "b")}

    async def post(gateway: Gateway, name: str) -> None:
        body = {"prompt": "x", "model": name}
        with pytest.raises(aiohttp.ClientError):
            await send(gateway, "/v1/completions", body, X_Request_Id=name)

    async with gateway_before(rings) as (_, gateway):
        tasks = [asyncio.create_task(post(gateway, name)) for name in ("a", "b")]
        while counts(rings) != [1, 1]:
            await asyncio.sleep(0.01)
        of_each = [gateway.num_open_of(model) for model in gateway.models]
        assert of_each == [1, 1] and gateway.num_open == 2
        aborted: list[str] = []

        async def abort(request_id: str) -> None:
            aborted.append(request_id)

        rings["b"].abort = abort  # type: ignore[method-assign]
        assert (await send(gateway, "/abort_request", {"rid": "b"})).body == {"aborted": 1}
        assert aborted == ["0"]
        gateway.fail_all(ServerUnreachable("the end"))
        for task in tasks:
            task.cancel()


@asynccontextmanager
async def gateway_on(
    directory: Path, rings: Mapping[str, ScriptedRing]
) -> AsyncIterator[tuple[Gateway, openai.AsyncOpenAI]]:
    """Run a gateway that keeps its streams and responses in a directory, with a client."""
    with closing(StreamRows(directory)) as rows:
        async with (
            gateway_before(rings, rows, data_dir=str(directory)) as (url, gateway),
            openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0) as client,
        ):
            yield gateway, client


@pytest.mark.parametrize("named", [{"model": "gpt-4o"}, {}])
async def test_a_stream_goes_on_at_its_model_after_a_restart(
    tmp_path: Path, named: dict[str, Any]
) -> None:
    asked = "b" if named else "a"
    rings = {name: OpenRing(PIECES) for name in ("a", "b gpt-4o")}
    async with (
        gateway_on(tmp_path, rings) as (gateway, _),
        streaming(gateway, "/v1/chat/completions", **named) as response,
    ):
        stream_id, before = response.headers["X-Stream-Id"], await events_of(response, 3)
        assert json.loads(before[0].partition(b"data: ")[2])["model"] == asked
    # The order of the models, and so the default, is another one, and the alias is a's.
    again = {"c": OpenRing(PIECES), "b": OpenRing(PIECES), "a gpt-4o": OpenRing(PIECES)}
    place = ["c", "b", "a"].index(asked)
    async with (
        gateway_on(tmp_path, again) as (gateway, _),
        reading(gateway, stream_id) as response,
    ):
        assert (await events_of(response, 3)) == before
        assert counts(again) == [int(number == place) for number in range(3)]
        gone = {"c": OpenRing(PIECES), "d": OpenRing(PIECES)}
    async with gateway_on(tmp_path, gone) as (gateway, _), reading(gateway, stream_id) as response:
        assert response.status == 404 and "stream_expired" in await response.text()
    assert counts(gone) == [0, 0]


async def test_a_stream_waits_for_its_own_model_alone(tmp_path: Path) -> None:
    rings = {name: OpenRing(PIECES) for name in "ab"}
    async with (
        gateway_on(tmp_path, rings) as (gateway, _),
        streaming(gateway, model="b") as response,
    ):
        stream_id, before = response.headers["X-Stream-Id"], await events_of(response, 2)
    again = {"a": DownRing([]), "b": OpenRing(PIECES)}
    async with (
        gateway_on(tmp_path, again) as (gateway, _),
        reading(gateway, stream_id) as response,
    ):
        assert (await events_of(response, 2)) == before


async def test_a_response_in_the_background_goes_on_at_its_model_after_a_restart(
    tmp_path: Path,
) -> None:
    rings = {name: ScriptedRing(["No"], leaves_open=True) for name in ("a", "b gpt-4o")}
    ask: Any = {"input": "Rain?", "background": True}
    async with gateway_on(tmp_path, rings) as (_, client):
        created = [await client.responses.create(**ask, model="gpt-4o")]
        created.append(await client.responses.create(**ask))
        assert [response.model for response in created] == ["b", "a"]
        while counts(rings) != [1, 1]:
            await asyncio.sleep(0.01)
    again = {name: ScriptedRing(["No", f" at {name}"]) for name in ("c", "b", "a")}
    async with gateway_on(tmp_path, again) as (_, client):
        for response in created:
            while (now := await client.responses.retrieve(response.id)).status == "in_progress":
                await asyncio.sleep(0.01)
            assert (now.status, now.model) == ("completed", response.model)
            assert now.output_text == f"No at {response.model}"
    assert counts(again) == [0, 1, 1]


async def test_a_response_continues_one_of_another_model(tmp_path: Path) -> None:
    rings = two()
    async with gateway_on(tmp_path, rings) as (_, client):
        first = await client.responses.create(input="Rain?", model="b")
        second = await client.responses.create(
            input="Sure?", model="a", previous_response_id=first.id
        )
        assert (await client.responses.retrieve(first.id)).model == "b"
        assert (await client.responses.retrieve(second.id)).model == "a"
    turns = rings["a"].submitted[0][0]
    assert [turn["content"] for turn in turns] == ["Rain?", "from b", "Sure?"]


async def test_the_lines_of_a_batch_name_different_models(tmp_path: Path) -> None:
    load = {"running": 0, "waiting": 0}
    rings = {name: ScriptedRing([f"from {name}"], **load) for name in "ab"}
    # Model b is busy at first: its line waits, and those of a do not.
    rings["b"].facts["ready"] = False
    bodies = [HI | {"model": "b"}, HI | {"model": "a"}, HI, HI | {"model": "c"}]
    lines = [
        {"custom_id": str(number), "method": "POST", "url": CHAT, "body": body}
        for number, body in enumerate(bodies)
    ]
    data = "\n".join(map(json.dumps, lines)).encode()
    async with (
        gateway_before(rings, data_dir=str(tmp_path)) as (_, gateway),
        aiohttp.ClientSession() as session,
    ):
        http = Http(gateway, session)
        batch = await http.start(data)
        assert batch["model"] is None
        while batch["request_counts"]["completed"] < 2 or not batch["request_counts"]["failed"]:
            await asyncio.sleep(0.01)
            _, batch = await http.call("get", f"/v1/batches/{batch['id']}")
        assert batch["status"] == "in_progress" and counts(rings) == [2, 0]
        rings["b"].facts["ready"] = True
        batch = await http.until(batch, "completed")
        answers = [
            json.loads(line)
            for file_id in (batch["output_file_id"], batch["error_file_id"])
            for line in (await http.content(file_id)).splitlines()
        ]
    found = {answer["custom_id"]: answer["response"]["body"] for answer in answers}
    assert [found[name]["model"] for name in "012"] == ["b", "a", "a"]
    assert found["3"]["error"]["code"] == "model_not_found"
