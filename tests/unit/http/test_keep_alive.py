"""Ollama's keep_alive and /api/ps: what the launcher is asked for, and what is shown."""

import asyncio
import json
import math
import re
import time
from datetime import datetime
from typing import Any

import pytest

from http_proc.apis.keep_alive import MAX_KEEP_S, keep_seconds
from http_proc.apis.model_states import MODEL_STATES, ModelStates, set_states
from http_proc.core.errors import ApiError
from http_proc.core.gateway import Gateway
from quadriga.clock import now
from tests.unit.http.calls import Answer, key_file, send
from tests.unit.http.server_info import info_of
from tests.unit.scripted_ring import ScriptedRing, gateway_before
from tests.unit.vector_ring import VectorRing

PROMPT: dict[str, Any] = {"model": "b", "prompt": "Hi", "stream": False}


class Launcher:
    """Notes what a gateway wishes, and loads and unloads models when a test says so."""

    def __init__(self, gateway: Gateway) -> None:
        self.wishes: list[dict[str, Any]] = []
        self._gateway = gateway
        gateway[MODEL_STATES] = ModelStates(lambda **wish: self.wishes.append(wish))

    def says(self, **models: Any) -> None:
        """Send states, of each model the values of ModelLoad."""
        set_states(self._gateway, json.dumps(models))


def test_a_keep_alive_is_seconds_or_a_duration() -> None:
    durations: dict[str | float, float] = {
        0: 0, 30: 30, 2.5: 2.5, -1: -1, "5m": 300, "24h": 86400, "1h30m": 5400, "300ms": 0.3,
        "-1m": -1, "-1": -1, "0": 0, "90": 90, "1.5s": 1.5, MAX_KEEP_S: MAX_KEEP_S,
        "999999h": -1, 1e300: -1,
    }  # fmt: skip
    for text, seconds in durations.items():
        assert keep_seconds(text) == seconds, text


@pytest.mark.parametrize("text", ["", "5 minutes", "m", "5x", "1h3", "--1", "5m" * 1000, "inf"])
def test_another_keep_alive_is_refused(text: str) -> None:
    with pytest.raises(ApiError, match=r"keep_alive is .*write seconds, or a duration"):
        keep_seconds(text)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/api/generate", PROMPT),
        ("/api/generate", PROMPT | {"stream": True}),
        ("/api/chat", {"model": "b", "messages": [{"role": "user", "content": "Hi"}]}),
        ("/api/embed", {"model": "b", "input": "Hi"}),
        ("/api/embeddings", {"model": "b", "prompt": "Hi"}),
    ],
)
async def test_a_model_is_kept_from_the_request_on_and_unloaded_after_it(
    path: str, body: dict[str, Any]
) -> None:
    ring: ScriptedRing = VectorRing() if "embed" in path else ScriptedRing(["x"])
    async with gateway_before({"a": ScriptedRing([]), "b": ring}) as (_, gateway):
        launcher = Launcher(gateway)
        submitted_at: list[int] = []
        submit = ring.submit

        def noting(*prompt: Any, **options: Any) -> Any:
            submitted_at.append(len(launcher.wishes))
            return submit(*prompt, **options)

        ring.submit = noting  # type: ignore[method-assign]
        for keep_alive, num_before, idle_s in (("5m", 1, 300.0), (-1, 1, -1.0), (0, 0, 0.0)):
            launcher.wishes.clear()
            submitted_at.clear()
            answer = await send(gateway, path, body | {"keep_alive": keep_alive})
            assert answer.status == 200, answer.text
            assert launcher.wishes == [{"name": "b", "idle_s": idle_s}]
            assert submitted_at == [num_before]
        launcher.wishes.clear()
        assert (await send(gateway, path, body)).status == 200
        answer = await send(gateway, path, body | {"keep_alive": "soon"})
        assert answer.status == 400 and "keep_alive is 'soon'" in answer.text
        assert launcher.wishes == []


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
async def test_a_request_without_input_waits_until_the_model_is_loaded(path: str) -> None:
    async with gateway_before({"a": ScriptedRing([]), "b": ScriptedRing([])}) as (_, gateway):
        launcher = Launcher(gateway)
        launcher.says(a={"state": "loaded"}, b={"state": "unloaded"})

        async def ask(**fields: Any) -> Answer:
            return await send(gateway, path, {"model": "b", **fields})

        async def asked(**fields: Any) -> "asyncio.Task[Answer]":
            launcher.wishes.clear()
            task = asyncio.create_task(ask(**fields))
            while not any("loaded" in wish for wish in launcher.wishes):
                await asyncio.sleep(0.01)
            return task

        task = await asked(keep_alive="1h")
        assert launcher.wishes == [
            {"name": "b", "idle_s": 3600.0},
            {"name": "b", "loaded": True},
        ]
        launcher.says(b={"state": "loading"})
        await asyncio.sleep(0.05)
        assert not task.done()
        launcher.says(b={"state": "loaded"})
        assert (await task).body["done_reason"] == "load"
        launcher.says(b={"state": "unloaded"})
        task = await asked()
        launcher.says(b={"state": "failed"})
        failed = await task
        assert failed.status == 503 and "'b' could not be loaded" in failed.text
        launcher.wishes.clear()
        assert (await ask(keep_alive=0)).body["done_reason"] == "unload"
        assert launcher.wishes == [{"name": "b", "idle_s": 0.0}]


async def test_a_tenants_keep_alive_has_no_effect(tmp_path: Any) -> None:
    keys = key_file(tmp_path, alice="a-key")
    rings = {"a": ScriptedRing([]), "b": ScriptedRing(["x"])}
    async with gateway_before(rings, keys=str(keys)) as (_, gateway):
        launcher = Launcher(gateway)
        for body in (PROMPT, {"model": "b"}):
            asked = body | {"keep_alive": 0}
            answer = await send(gateway, "/api/generate", asked, Authorization="Bearer a-key")
            assert answer.status == 200
        assert launcher.wishes == []


async def test_ps_has_the_loaded_models_their_memory_and_when_they_are_unloaded() -> None:
    rings = {name: ScriptedRing(["x"]) for name in "abc"}
    async with gateway_before(rings) as (_, gateway):
        launcher = Launcher(gateway)
        used_at = time.monotonic() - 40
        launcher.says(
            a={"state": "loaded", "num_bytes": 123, "idle_s": 300, "used_at": used_at},
            b={"state": "unloaded", "num_bytes": 5},
            c={"state": "loaded", "idle_s": None},
        )

        async def listed() -> dict[str, Any]:
            models = (await send(gateway, "/api/ps")).body["models"]
            return {model["name"]: model for model in models}

        found = await listed()
        assert list(found) == ["a:latest", "c:latest"]
        assert found["a:latest"]["size"] == 123
        assert found["c:latest"]["expires_at"].startswith("9999-12-31")
        rest_s = datetime.fromisoformat(found["a:latest"]["expires_at"]).timestamp() - now()
        assert math.isclose(rest_s, 260, abs_tol=5)
        rings["a"].facts["open_requests"] = 1
        await asyncio.sleep(0.6)
        found = await listed()
        rest_s = datetime.fromisoformat(found["a:latest"]["expires_at"]).timestamp() - now()
        assert math.isclose(rest_s, 300, abs_tol=5)


async def test_the_only_model_of_a_server_has_a_state_too() -> None:
    async with gateway_before(ScriptedRing(["x"])) as (_, gateway):
        Launcher(gateway).says(**{"": {"state": "unloaded"}})
        assert (await send(gateway, "/models")).body["data"][0]["status"]["value"] == "unloaded"
        assert (await send(gateway, "/api/ps")).body["models"] == []


async def test_the_metrics_have_the_state_of_each_model_and_count_its_loads() -> None:
    rings = {name: ScriptedRing([], **info_of()) for name in "ab"}
    async with gateway_before(rings) as (_, gateway):
        Launcher(gateway).says(b={"state": "unloaded", "num_loads": 3, "num_unloads": 2})
        text = (await send(gateway, "/metrics")).text
    states = re.findall(r'^quadriga:model_state\{model_name="b",state="(.*)"\} 1.0', text, re.M)
    assert states == ["unloaded"]
    assert 'quadriga:model_state{model_name="a",state="loaded"} 1.0' in text
    assert 'quadriga:model_state{model_name="b",state="failed"} 0.0' in text
    assert 'quadriga:model_loads_total{model_name="b"} 3.0' in text
    assert 'quadriga:model_unloads_total{model_name="b"} 2.0' in text
