"""GET / for browsers and for programs."""

import asyncio
import re
from typing import Any

import aiohttp
import pytest

from tests.unit.scripted_ring import ScriptedRing, gateway_before

BROWSER = "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"


def get(accept: str, **flags: Any) -> tuple[str, str, list[int]]:
    """Return type and text of GET /, and the status of each page that it links."""

    async def ask() -> tuple[str, str, list[int]]:
        async with (
            gateway_before(ScriptedRing([]), no_ui=True, **flags) as (url, _),
            aiohttp.ClientSession() as session,
        ):
            async with session.get(f"{url}/", headers={"Accept": accept}) as response:
                assert response.status == 200
                text = await response.text()
            statuses = []
            for path in re.findall(r'href="([^"]+)"', text):
                async with session.get(f"{url}/{path}") as page:
                    statuses.append(page.status)
            return response.content_type, text, statuses

    return asyncio.run(asyncio.wait_for(ask(), 20))


def test_without_the_page_a_browser_gets_a_list_whose_links_exist() -> None:
    kind, text, statuses = get(BROWSER, served_model_name="a<b>")
    assert kind == "text/html"
    assert "a&lt;b&gt;" in text and "<b>" not in text
    assert len(statuses) == 6 and 404 not in statuses


@pytest.mark.parametrize("accept", ["*/*", "application/json"])
def test_a_program_gets_json(accept: str) -> None:
    kind, text, _ = get(accept, served_model_name="tiny")
    assert kind == "application/json"
    assert '"model":"tiny"' in text and '"docs":"/docs"' in text


@pytest.mark.parametrize("agent", ["ollama/0.6.1 (amd64 linux)", "ollama-python/0.6.1"])
async def test_a_client_of_ollama_finds_its_server_and_anthropics_its_models(agent: str) -> None:
    async with gateway_before(ScriptedRing([])) as (url, _), aiohttp.ClientSession(url) as session:
        async with session.get("/", headers={"User-Agent": agent}) as response:
            assert await response.text() == "Ollama is running"
        async with session.head("/", headers={"User-Agent": agent}) as response:
            assert response.status == 200
        version = {"anthropic-version": "2023-06-01"}
        async with session.get("/v1/models", headers=version) as response:
            models = await response.json()
        (model,) = models["data"]
        assert (model["type"], model["id"]) == ("model", models["first_id"])
        assert models["last_id"] == model["display_name"] and not models["has_more"]
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", model["created_at"])
        path = f"/v1/models/{model['id']}"
        async with session.get(path, headers=version) as response:
            assert await response.json() == model
        async with session.get(path) as response:
            assert (await response.json())["object"] == "model"
