"""Conversations: made, changed, listed, continued by responses, and removed."""

import asyncio
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.unit.http.responses.asking import ASK, CALL, WEATHER, asking, stream, turns_of
from tests.unit.scripted_ring import ScriptedRing, chunk

HELLO: Any = {"type": "message", "role": "user", "content": "Hello."}


def texts(items: list[Any]) -> list[str]:
    return [item.content[0].text for item in items]


async def test_a_conversation_is_made_changed_and_removed(tmp_path: Path) -> None:
    async with asking(ScriptedRing(["No"]), data_dir=str(tmp_path)) as client:
        made = await client.conversations.create(items=[HELLO], metadata={"topic": "rain"})
        assert made.id.startswith("conv_") and made.object == "conversation"
        assert await client.conversations.retrieve(made.id) == made
        changed = await client.conversations.update(made.id, metadata={"topic": "sun"})
        assert changed.metadata == {"topic": "sun"} and changed.created_at == made.created_at
        gone = await client.conversations.delete(made.id)
        assert gone.deleted and gone.object == "conversation.deleted"
        with pytest.raises(openai.NotFoundError, match="was deleted"):
            await client.conversations.retrieve(made.id)
        with pytest.raises(openai.NotFoundError, match="was deleted"):
            await client.responses.create(**ASK, conversation=made.id)
        with pytest.raises(openai.NotFoundError, match="there is no conversation 'conv_1'"):
            await client.conversations.items.list("conv_1")


async def test_items_are_added_listed_in_pages_and_removed(tmp_path: Path) -> None:
    async with asking(ScriptedRing(["No"]), data_dir=str(tmp_path)) as client:
        made = await client.conversations.create(items=[HELLO])
        items = client.conversations.items
        more: Any = [{"role": "user", "content": str(number)} for number in range(4)]
        added = await items.create(made.id, items=more)
        assert texts(added.data) == list("0123") and not added.has_more
        listed = [item async for item in items.list(made.id, limit=2)]
        assert texts(listed) == ["3", "2", "1", "0", "Hello."]
        assert all(item.status == "completed" for item in listed)
        in_order = [item async for item in items.list(made.id, limit=2, order="asc")]
        assert in_order == listed[::-1]
        one = await items.retrieve(str(listed[1].id), conversation_id=made.id)
        assert one == listed[1]
        assert (await items.delete(str(one.id), conversation_id=made.id)).id == made.id
        assert texts((await items.list(made.id)).data) == ["3", "1", "0", "Hello."]
        for attempt in (items.retrieve, items.delete):
            with pytest.raises(openai.NotFoundError, match="has no item"):
                await attempt(str(one.id), conversation_id=made.id)


@pytest.mark.parametrize("streams", [False, True])
async def test_a_response_continues_a_conversation_and_adds_to_it(
    tmp_path: Path, streams: bool
) -> None:
    ring = ScriptedRing(["No", " rain."])
    async with asking(ring, data_dir=str(tmp_path)) as client:
        talk = await client.conversations.create(items=[HELLO])
        ask: Any = {**ASK, "conversation": talk.id}
        answer = (
            (await stream(client, **ask))[0] if streams else await client.responses.create(**ask)
        )
        assert answer.conversation is not None and answer.conversation.id == talk.id
        assert [turn["content"] for turn in turns_of(ring)] == ["Hello.", "Rain?"]
        # It adds to the conversation even if the response itself is not stored.
        more: Any = {"model": "tiny", "input": "Sure?", "store": False}
        await client.responses.create(**more, conversation={"id": talk.id})
        contents = [turn["content"] for turn in turns_of(ring)]
        assert contents == ["Hello.", "Rain?", "No rain.", "Sure?"]
        items = (await client.conversations.items.list(talk.id, order="asc")).data
        assert texts(items) == ["Hello.", "Rain?", "No rain.", "Sure?", "No rain."]


@pytest.mark.parametrize("is_stored", [False, True])
@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("kind", ["whole", "stream", "background"])
async def test_each_request_of_one_request_id_adds_its_turn(
    tmp_path: Path, is_stored: bool, at_once: bool, kind: str
) -> None:
    if kind == "background" and not is_stored:
        return  # such a request is refused
    ring = ScriptedRing(["No"])
    ring.leaves_open = at_once
    async with asking(ring, data_dir=str(tmp_path)) as client:
        talk = await client.conversations.create()

        async def add(text: str) -> str:
            ask: Any = {**ASK, "input": text, "conversation": talk.id, "store": is_stored}
            ask["extra_headers"] = {"X-Request-Id": "same"}
            if kind == "stream":
                events = [
                    event async for event in await client.responses.create(**ask, stream=True)
                ]
                return str(events[-1].response.id)
            made = await client.responses.create(**ask, background=kind == "background")
            while kind == "background" and made.status != "completed":
                made = await client.responses.retrieve(made.id)
            return str(made.id)

        if at_once:
            adding = [asyncio.create_task(add(text)) for text in ("One?", "Two?")]
            while len(ring.handles) < 2:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0)  # the ring sends its pieces in the turn after a request
            for handle, sink in zip(ring.handles, ring.sinks, strict=True):
                handle.done = True
                sink(chunk("", ring.completion()))
            ids = [await one for one in adding]
        else:
            ids = [await add(text) for text in ("One?", "Two?")]
        assert len(set(ids)) == 2 and "resp_same" in ids
        items = (await client.conversations.items.list(talk.id, order="asc")).data
        assert sorted(texts(items)) == ["No", "No", "One?", "Two?"]
        if is_stored:
            for response_id in ids:
                assert (await client.responses.retrieve(response_id)).store is True


async def test_a_call_in_a_conversation_is_answered_by_the_next_input(tmp_path: Path) -> None:
    ring = ScriptedRing([CALL])
    async with asking(ring, data_dir=str(tmp_path)) as client:
        talk = await client.conversations.create()
        ask: Any = {"model": "tiny", "conversation": talk.id, "tools": [WEATHER]}
        first = await client.responses.create(**ask, input="Rain?")
        (call,) = first.output
        ring.pieces = ["Sun."]
        output = {"type": "function_call_output", "call_id": call.call_id, "output": "sun"}
        await client.responses.create(**ask, input=[output])
        assert [turn["role"] for turn in turns_of(ring)] == ["user", "assistant", "tool"]
        kinds = [item.type async for item in client.conversations.items.list(talk.id, order="asc")]
        assert kinds == ["message", "function_call", "function_call_output", "message"]


async def test_wrong_conversations_are_refused_by_name(tmp_path: Path) -> None:
    async with asking(ScriptedRing(["No"]), data_dir=str(tmp_path)) as client:
        image: Any = {"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}
        wrong: list[tuple[dict[str, Any], str]] = [
            ({"items": [{"type": "web"}]}, "items[0].type is 'web'"),
            (
                {"items": [HELLO, {"type": "message", "role": "user"}]},
                "items[1].content is missing",
            ),
            ({"items": [image]}, "takes only text"),
            ({"items": [HELLO] * 5000}, "items has 5000 turns: at most 4096"),
            ({"metadata": {"a": 1}}, "metadata"),
            ({"name": "x"}, "name"),
        ]
        for body, match in wrong:
            with pytest.raises(openai.BadRequestError) as raised:
                await client.conversations.create(extra_body=body)
            assert match in str(raised.value)
        talk = await client.conversations.create(items=[{**HELLO, "id": "msg_1"}])
        with pytest.raises(openai.BadRequestError, match="at least one"):
            await client.conversations.items.create(talk.id, items=[])
        with pytest.raises(openai.BadRequestError, match="which the conversation has already"):
            await client.conversations.items.create(talk.id, items=[{**HELLO, "id": "msg_1"}])
        with pytest.raises(openai.BadRequestError, match="conversation must be an id"):
            await client.responses.create(**ASK, conversation={})


async def test_a_server_without_a_directory_has_no_conversations() -> None:
    async with asking(ScriptedRing(["No"])) as client:
        with pytest.raises(openai.NotFoundError, match="--no-store"):
            await client.conversations.create()
        with pytest.raises(openai.BadRequestError, match="stores no conversations"):
            await client.responses.create(**ASK, conversation="conv_1")
