"""Names that are moved between models: who answers, what stays, what is refused."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from http_proc.core.gateway import Gateway
from http_proc.core.served_model import LOST
from quadriga.server.model_aliases import FILE_NAME, read_aliases
from quadriga.server.model_list import ModelLoad
from tests.unit.http.calls import key_file, send
from tests.unit.http.streams.stream_clients import PIECES, OpenRing, events_of, streaming
from tests.unit.scripted_ring import ScriptedRing, gateway_before

PROMPT: dict[str, Any] = {"prompt": "Hi"}
NUM_ASKED = 100


def blue_and_green() -> dict[str, ScriptedRing]:
    return {"blue prod": ScriptedRing(["x"]), "green": ScriptedRing(["x"])}


async def move(gateway: Gateway, status: int = 200, **fields: Any) -> Any:
    answer = await send(gateway, "/models/alias", {"alias": "prod", "model": "green"} | fields)
    assert answer.status == status, answer.text
    return answer.body if status == 200 else answer.body["error"]["message"]


async def model_of(gateway: Gateway, request_id: str = "r") -> Any:
    body = PROMPT | {"model": "prod"}
    answer = await send(gateway, "/v1/completions", body, X_Request_Id=request_id)
    assert answer.status == 200, answer.text
    return answer.body["model"]


async def listed(gateway: Gateway) -> dict[str, tuple[list[str], dict[str, float]]]:
    models = (await send(gateway, "/models")).body["data"]
    return {model["id"]: (sorted(model["aliases"]), model.get("canaries", {})) for model in models}


async def test_new_requests_of_a_moved_alias_get_the_new_model() -> None:
    async with gateway_before(blue_and_green()) as (_, gateway):
        assert await model_of(gateway) == "blue"
        assert await move(gateway) == {"alias": "prod", "model": "green"}
        assert await model_of(gateway) == "green"
        assert await listed(gateway) == {"blue": ([], {}), "green": (["prod"], {})}
        cards = (await send(gateway, "/v1/models")).body["data"]
        assert [card.get("aliases") for card in cards] == [None, ["prod"]]
        await move(gateway, model="blue")
        assert await model_of(gateway) == "blue"


async def test_a_new_alias_is_a_name_for_a_model_also_of_a_single_one() -> None:
    async with gateway_before({"blue": ScriptedRing(["x"])}) as (_, gateway):
        await move(gateway, model="blue", alias="gpt-4o")
        body = PROMPT | {"model": "gpt-4o"}
        assert (await send(gateway, "/v1/completions", body)).body["model"] == "blue"
        generated = PROMPT | {"model": "gpt-4o:latest", "stream": False}
        assert (await send(gateway, "/api/generate", generated)).status == 200


async def test_running_streams_end_at_the_model_that_began_them() -> None:
    rings = {"blue prod": OpenRing(PIECES), "green": OpenRing(PIECES)}
    async with (
        gateway_before(rings) as (_, gateway),
        streaming(gateway, "/v1/chat/completions", model="prod") as response,
    ):
        await events_of(response, 1)
        await move(gateway)
        assert [len(ring.submitted) for ring in rings.values()] == [1, 0]
        async with streaming(gateway, "/v1/chat/completions", model="prod") as later:
            await events_of(later, 1)
        assert [len(ring.submitted) for ring in rings.values()] == [1, 1]
        await events_of(response, 1)


async def test_a_canary_gets_its_share_and_the_same_requests_when_it_grows() -> None:
    async with gateway_before(blue_and_green()) as (_, gateway):
        of_share: dict[float, set[int]] = {}
        for share in (0.1, 0.5):
            answer = await move(gateway, canary=share)
            assert (answer["model"], answer["canary_model"]) == ("blue", "green")
            assert answer["canary"] == share
            names = [await model_of(gateway, f"r{number}") for number in range(NUM_ASKED)]
            assert names == [await model_of(gateway, f"r{number}") for number in range(NUM_ASKED)]
            of_share[share] = {number for number, name in enumerate(names) if name == "green"}
            assert abs(len(of_share[share]) / NUM_ASKED - share) < 0.1
            assert await listed(gateway) == {
                "blue": (["prod"], {}),
                "green": ([], {"prod": share}),
            }
        assert of_share[0.1] < of_share[0.5]
        await move(gateway, canary=0)
        assert await listed(gateway) == {"blue": (["prod"], {}), "green": ([], {})}
        await move(gateway, canary=0.5)
        await move(gateway, canary=1)
        assert await listed(gateway) == {"blue": ([], {}), "green": (["prod"], {})}


async def test_a_canary_that_is_lost_leaves_its_requests_to_the_other_model() -> None:
    async with gateway_before(blue_and_green()) as (_, gateway):
        await move(gateway, canary=0.9)
        names = {await model_of(gateway, f"r{number}") for number in range(40)}
        assert names == {"blue", "green"}
        list(gateway.models)[1].load = ModelLoad(LOST)
        assert {await model_of(gateway, f"r{number}") for number in range(40)} == {"blue"}
        assert "has ended for good" in await move(gateway, 409)


async def test_a_gateway_that_is_restarted_knows_the_aliases(tmp_path: Path) -> None:
    async with gateway_before(blue_and_green(), None, tmp_path) as (_, gateway):
        await asyncio.gather(
            move(gateway, canary=0.25),
            *(move(gateway, alias=f"a{number}") for number in range(8)),
        )
        before = await listed(gateway)
    assert before["green"] == ([f"a{number}" for number in range(8)], {"prod": 0.25})
    assert len(read_aliases(tmp_path / FILE_NAME)) == 9
    async with gateway_before(blue_and_green(), None, tmp_path) as (_, gateway):
        assert {name: (sorted(names), shares) for name, (names, shares) in before.items()} == {
            name: (sorted(names), shares)
            for name, (names, shares) in (await listed(gateway)).items()
        }


async def test_an_alias_that_cannot_be_kept_is_not_moved(tmp_path: Path) -> None:
    gone = tmp_path / "run"
    gone.mkdir()
    async with gateway_before(blue_and_green(), None, gone) as (_, gateway):
        gone.rename(tmp_path / "elsewhere")
        assert "'prod' was not moved" in await move(gateway, 503)
        assert await model_of(gateway) == "blue"


@pytest.mark.parametrize(
    ("fields", "status", "message"),
    [
        ({"alias": "blue"}, 400, "alias is 'blue', which is a model's own name: choose another"),
        ({"alias": "a b"}, 400, "alias is 'a b': give it a name without blanks"),
        ({"alias": ""}, 400, "alias"),
        ({"model": "red"}, 404, "model 'red' is not served here: use 'blue' or 'green'"),
        ({"model": "prod"}, 400, "model is 'prod', which is an alias: use the model's own name"),
        ({"canary": 1.5}, 400, "canary"),
        ({"canary": -0.1}, 400, "canary"),
        ({"canary": 0.1, "alias": "new"}, 400, "canary is 0.1, and alias 'new' has no model"),
        ({"canary": 0.1, "model": "blue"}, 400, "alias 'prod' is of 'blue' already"),
    ],
)
async def test_what_cannot_be_moved_is_refused(
    fields: dict[str, Any], status: int, message: str
) -> None:
    async with gateway_before(blue_and_green()) as (_, gateway):
        assert message in await move(gateway, status, **fields)
        assert await listed(gateway) == {"blue": (["prod"], {}), "green": ([], {})}


async def test_a_tenant_moves_no_alias(tmp_path: Path) -> None:
    keys = key_file(tmp_path, alice="a-key")
    async with gateway_before(blue_and_green(), keys=str(keys), api_key="op") as (_, gateway):
        body = {"alias": "prod", "model": "green"}
        for key, status in (("a-key", 403), ("op", 200)):
            headers = {"Authorization": f"Bearer {key}"}
            assert (await send(gateway, "/models/alias", body, **headers)).status == status
