"""Responses that are stored: continued, read, replayed, listed and removed."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest

from quadriga.errors import ConfigError
from quadriga.server.config.server_config import ServerConfig
from tests.unit.http.calls import key_file, send
from tests.unit.http.responses.asking import (
    ASK,
    CALL,
    THINKING,
    WEATHER,
    asking,
    check_events,
    refused,
    stream,
    turns_of,
)
from tests.unit.scripted_ring import ScriptedRing, gateway_before, openai_before

ANSWERED: Any = {"role": "assistant", "content": "No rain."}
WITH_CALL: Any = {"arguments": {"city": "Rome"}, "name": "weather"}


async def test_a_response_continues_the_previous_one_without_its_instructions(
    tmp_path: Path,
) -> None:
    ring = ScriptedRing(["No", " rain."])
    async with asking(ring, data_dir=str(tmp_path)) as client:
        first = await client.responses.create(**ASK, instructions="Be brief.")
        assert first.store is True
        ask = {"model": "tiny", "input": "Sure?", "previous_response_id": first.id}
        second = await client.responses.create(**ask, instructions="Be kind.")
        assert second.previous_response_id == first.id
        assert turns_of(ring) == [
            {"role": "system", "content": "Be kind."},
            {"role": "user", "content": "Rain?"},
            ANSWERED,
            {"role": "user", "content": "Sure?"},
        ]
        final, _ = await stream(client, **{**ask, "previous_response_id": second.id})
        assert len(turns_of(ring)) == 5
        # The last event is sent after the response is handed to the store.
        await client.responses.create(**{**ask, "previous_response_id": final.id})
        assert len(turns_of(ring)) == 7


async def test_a_call_and_its_reasoning_are_continued_by_the_output(tmp_path: Path) -> None:
    ring = ScriptedRing(["<think>", "hm", "</think>", CALL, ""], answer_format=THINKING)
    async with asking(ring, data_dir=str(tmp_path)) as client:
        first = await client.responses.create(**ASK, tools=[WEATHER])
        call = first.output[-1]
        output = {"type": "function_call_output", "call_id": call.call_id, "output": "sun"}
        ring.pieces = ["Sun."]
        follow: Any = {"model": "tiny", "input": [output], "previous_response_id": first.id}
        second = await client.responses.create(**follow)
        user, assistant, tool = turns_of(ring)
        assert user == {"role": "user", "content": "Rain?"}
        assert assistant["reasoning_content"] == "hm"
        assert assistant["tool_calls"][0]["function"] == WITH_CALL
        assert tool == {"role": "tool", "content": "sun", "tool_call_id": call.call_id}
        items = [item async for item in client.responses.input_items.list(second.id, order="asc")]
        kinds = ["message", "reasoning", "function_call", "function_call_output"]
        assert [item.type for item in items] == kinds
        await refused(
            client, "input", r"stored_items\[2\] is the call", previous_response_id=first.id
        )


async def test_a_call_that_was_cut_is_not_continued(tmp_path: Path) -> None:
    ring = ScriptedRing(['<tool_call>\n{"name": "weather", "arguments": {"ci'])
    ring.finish_reason = "length"
    async with asking(ring, data_dir=str(tmp_path)) as client:
        first = await client.responses.create(**ASK, tools=[WEATHER])
        assert [item.status for item in first.output] == ["incomplete"]
        await client.responses.create(**ASK, previous_response_id=first.id)
        assert [turn["role"] for turn in turns_of(ring)] == ["user", "user"]


@pytest.mark.parametrize("streams", [False, True])
async def test_a_stored_response_is_the_one_that_was_answered(
    tmp_path: Path, streams: bool
) -> None:
    ring = ScriptedRing(["No", " rain."])
    async with asking(ring, data_dir=str(tmp_path)) as client:
        if streams:
            events = [event async for event in await client.responses.create(**ASK, stream=True)]
            answered: Any = events[-1].response
        else:
            answered = await client.responses.create(**ASK)
        assert await client.responses.retrieve(answered.id) == answered


@pytest.mark.parametrize("streams", [False, True])
async def test_the_stream_of_a_stored_response_is_sent_again_from_any_event(
    tmp_path: Path, streams: bool
) -> None:
    ring = ScriptedRing(["No", " rain", "."])
    async with gateway_before(ring, data_dir=str(tmp_path)) as (_, gateway):
        answer = await send(gateway, "/v1/responses", {**ASK, "stream": streams})
        sent = answer.text
        if streams:
            response_id = json.loads(sent.split("data: ")[1].split("\n")[0])["response"]["id"]
        else:
            response_id = answer.body["id"]

        async def replayed(query: str = "") -> str:
            answer = await send(gateway, f"/v1/responses/{response_id}?stream=true{query}")
            assert answer.headers["Content-Type"].startswith("text/event-stream")
            return answer.text

        whole = await replayed()
        assert not streams or whole == sent
        events = [event + "\n\n" for event in whole.split("\n\n")[:-1]]
        for number in range(len(events) + 1):
            rest = await replayed(f"&starting_after={number}")
            assert rest == "".join(events[number + 1 :])


async def test_the_client_reads_a_replayed_stream(tmp_path: Path) -> None:
    ring = ScriptedRing(["No", " rain."])
    async with asking(ring, data_dir=str(tmp_path)) as client:
        first = await client.responses.create(**ASK)
        events = [event async for event in await client.responses.retrieve(first.id, stream=True)]
        check_events(events)
        assert events[-1].response.output == first.output
        rest = await client.responses.retrieve(first.id, stream=True, starting_after=3)
        numbers = [event.sequence_number async for event in rest]
        assert numbers == list(range(4, len(events)))


async def test_input_items_come_in_pages(tmp_path: Path) -> None:
    ring = ScriptedRing(["No"])
    asked: Any = [{"role": "user", "content": str(number)} for number in range(5)]
    async with asking(ring, data_dir=str(tmp_path)) as client:
        first = await client.responses.create(model="tiny", input=asked)
        pages = client.responses.input_items
        newest = await pages.list(first.id, limit=2)
        assert [item.content[0].text for item in newest.data] == ["4", "3"]
        assert newest.has_more
        in_order = [item async for item in pages.list(first.id, limit=2, order="asc")]
        assert [item.content[0].text for item in in_order] == list("01234")
        second = await client.responses.create(**ASK, previous_response_id=first.id)
        again = [item async for item in pages.list(second.id, order="asc")]
        assert [item.id for item in again[:5]] == [item.id for item in in_order]
        assert [item.role for item in again[5:]] == ["assistant", "user"]
        with pytest.raises(openai.BadRequestError, match="limit is '0'"):
            await pages.list(first.id, limit=0)
        with pytest.raises(openai.BadRequestError, match="no such id"):
            await pages.list(first.id, after="msg_x")


async def test_items_are_referred_to_by_their_ids(tmp_path: Path) -> None:
    ring = ScriptedRing(["No", " rain."])
    async with asking(ring, data_dir=str(tmp_path)) as client:
        first = await client.responses.create(**ASK)
        reference: Any = {"type": "item_reference", "id": first.output[0].id}
        asked: Any = [{"role": "user", "content": "Rain?"}, reference]
        await client.responses.create(model="tiny", input=asked)
        assert turns_of(ring)[1] == ANSWERED
        missing: Any = [{"type": "item_reference", "id": "msg_9"}]
        with pytest.raises(openai.NotFoundError, match="there is no item 'msg_9'") as raised:
            await client.responses.create(model="tiny", input=missing)
        assert raised.value.param == "input[0]"


async def test_a_deleted_response_says_so_and_ends_the_chain_after_it(tmp_path: Path) -> None:
    ring = ScriptedRing(["No"])
    async with asking(ring, data_dir=str(tmp_path)) as client:
        first = await client.responses.create(**ASK)
        second = await client.responses.create(**ASK, previous_response_id=first.id)
        await client.responses.delete(first.id)
        for attempt in (client.responses.retrieve, client.responses.delete):
            with pytest.raises(openai.NotFoundError, match="was deleted") as raised:
                await attempt(first.id)
            assert raised.value.code == "response_deleted"
        with pytest.raises(openai.NotFoundError, match=f"{second.id}.*was deleted") as raised:
            await client.responses.create(**ASK, previous_response_id=second.id)
        assert raised.value.code == "previous_response_not_found"
        assert (await client.responses.retrieve(second.id)).output == second.output
        with pytest.raises(openai.NotFoundError, match="there is no response 'resp_x'") as raised:
            await client.responses.retrieve("resp_x")
        assert raised.value.code == "response_unknown"


async def test_responses_outlive_the_gateway(tmp_path: Path) -> None:
    ring, ids = ScriptedRing(["No"]), []
    async with asking(ring, data_dir=str(tmp_path)) as client:
        ids.append((await client.responses.create(**ASK)).id)
    async with asking(ring, data_dir=str(tmp_path)) as client:
        second = await client.responses.create(**ASK, previous_response_id=ids[0])
        assert second.output_text == "No" and len(turns_of(ring)) == 3
    assert (tmp_path / "responses.sqlite3").stat().st_mode & 0o777 == 0o600


async def test_store_false_keeps_nothing(tmp_path: Path) -> None:
    ring = ScriptedRing(["No"])
    async with asking(ring, data_dir=str(tmp_path)) as client:
        answer = await client.responses.create(**ASK, store=False)
        assert answer.store is False
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(answer.id)


async def test_a_client_that_leaves_keeps_no_response(tmp_path: Path) -> None:
    ring = ScriptedRing(["No", " rain."], leaves_open=True)
    async with asking(ring, data_dir=str(tmp_path)) as client:
        events = await client.responses.create(**ASK, stream=True)
        created = await anext(aiter(events))
        await events.close()
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(created.response.id)


async def test_two_requests_of_one_request_id_are_two_responses(tmp_path: Path) -> None:
    ring = ScriptedRing(["No"])
    async with asking(ring, data_dir=str(tmp_path)) as client:
        same = {"X-Request-Id": "same"}
        ids = {(await client.responses.create(**ASK, extra_headers=same)).id for _ in range(2)}
        assert len(ids) == 2 and "resp_same" in ids
        assert all(one.partition("~")[0] == "resp_same" for one in ids)
        for one in ids:
            assert (await client.responses.retrieve(one)).id == one


async def test_wrong_queries_are_refused(tmp_path: Path) -> None:
    ring = ScriptedRing(["No"])
    async with asking(ring, data_dir=str(tmp_path)) as client:
        response = await client.responses.create(**ASK)
        for query, match in (
            ({"stream": "yes"}, "stream is 'yes'"),
            ({"stream": "true", "starting_after": "-1"}, "starting_after is '-1'"),
            ({"stream": "true", "starting_after": "9" * 20}, "starting_after is '999"),
        ):
            with pytest.raises(openai.BadRequestError, match=match):
                await client.responses.retrieve(response.id, extra_query=query)
        with pytest.raises(openai.BadRequestError, match="has no background: true"):
            await client.responses.cancel(response.id)
        await refused(
            client, "conversation", "a response continues one of them",
            previous_response_id=response.id, conversation="conv_1",
        )  # fmt: skip


async def test_a_server_without_a_directory_says_how_to_store() -> None:
    async with asking(ScriptedRing(["No"])) as client:
        assert (await client.responses.create(**ASK)).store is False
        with pytest.raises(openai.NotFoundError, match="--no-store"):
            await client.responses.retrieve("resp_1")


async def test_a_response_belongs_to_the_tenant_of_its_key(tmp_path: Path) -> None:
    keys = key_file(tmp_path, alice="alice", robert="robert")
    flags = {"keys": str(keys), "data_dir": str(tmp_path / "data")}
    async with gateway_before(ScriptedRing(["No"]), **flags) as (_, gateway):
        url = f"{gateway.args.url}/v1"
        async with (
            openai.AsyncOpenAI(base_url=url, api_key="alice", max_retries=0) as alice,
            openai.AsyncOpenAI(base_url=url, api_key="robert", max_retries=0) as robert,
        ):
            hers = await alice.responses.create(**ASK)
            talk = await alice.conversations.create()
            reference: Any = [{"type": "item_reference", "id": hers.output[0].id}]
            attempts: list[Callable[[], Any]] = [
                lambda: robert.responses.retrieve(hers.id),
                lambda: robert.responses.retrieve(hers.id, stream=True),
                lambda: robert.responses.delete(hers.id),
                lambda: robert.responses.cancel(hers.id),
                lambda: robert.responses.input_items.list(hers.id),
                lambda: robert.responses.create(**ASK, previous_response_id=hers.id),
                lambda: robert.responses.create(**ASK, conversation=talk.id),
                lambda: robert.responses.create(model="tiny", input=reference),
                lambda: robert.conversations.retrieve(talk.id),
                lambda: robert.conversations.delete(talk.id),
                lambda: robert.conversations.items.list(talk.id),
            ]
            for attempt in attempts:
                with pytest.raises(openai.PermissionDeniedError, match="another tenant"):
                    await attempt()
            assert (await alice.responses.retrieve(hers.id)).id == hers.id
            await alice.responses.delete(hers.id)
            with pytest.raises(openai.PermissionDeniedError):
                await robert.responses.retrieve(hers.id)


async def test_metrics_count_what_is_stored(tmp_path: Path) -> None:
    ring = ScriptedRing(["No"], ready=False)
    async with openai_before(ring, data_dir=str(tmp_path)) as (client, gateway):
        for _ in range(3):
            await client.responses.create(**ASK)
        await client.conversations.create()
        text = (await send(gateway, "/metrics")).text
        assert 'quadriga:stored_responses{model_name="tiny"} 3.0' in text
        assert 'quadriga:stored_conversations{model_name="tiny"} 1.0' in text
        assert 'quadriga:response_saves_total{model_name="tiny",outcome="stored"} 3.0' in text
        assert 'quadriga:response_store_failed{model_name="tiny"} 0.0' in text


async def test_two_gateways_do_not_use_one_file(tmp_path: Path) -> None:
    async with (
        gateway_before(ScriptedRing(["No"]), data_dir=str(tmp_path)),
        gateway_before(ScriptedRing(["No"]), data_dir=str(tmp_path)) as (url, _),
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="k") as client,
    ):
        answer = await client.responses.create(**ASK)
        assert answer.store is False


async def test_without_a_flag_responses_are_kept_in_the_run_directory(tmp_path: Path) -> None:
    ring = ScriptedRing(["No", " rain."])

    async def ask(response_id: str = "", **flags: Any) -> tuple[Any, Path | None, bool]:
        """Return a response, and where and for how long the gateway keeps it."""
        async with (
            gateway_before(ring, None, tmp_path / "run", **flags) as (url, gateway),
            openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0) as client,
        ):
            kept = gateway.data_dir, gateway.outlives_server
            if response_id:
                return await client.responses.retrieve(response_id), *kept
            file = await client.files.create(file=("a", b"{}"), purpose="batch")
            assert (await client.files.content(file.id)).content == b"{}"
            return await client.responses.create(**ASK), *kept

    (tmp_path / "run").mkdir()
    first, directory, outlives_server = await ask()
    assert first.store is True and directory == tmp_path / "run" / "data"
    assert not outlives_server
    assert (await ask(first.id))[0] == first
    other = await ask(data_dir=str(tmp_path / "data"))
    assert other[1:] == (tmp_path / "data", True)
    with pytest.raises(openai.NotFoundError, match="--no-store"):
        await ask(first.id, no_store=True)
    with pytest.raises(openai.InternalServerError, match="--no-store"):
        await ask(no_store=True)


def test_no_store_and_a_directory_for_data_are_refused(tmp_path: Path) -> None:
    config = ServerConfig().replace(no_store=True, data_dir=str(tmp_path))
    with pytest.raises(ConfigError, match="leave one of them out"):
        config.validate()
