"""Several models behind one address: each request gets the model that it names."""

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from bench.client.server import free_port
from quadriga import AsyncClient, Client
from quadriga.errors import InvalidRequest, ServerFailed
from tests.server import Server, running_server
from tests.two_models import FLAGS, GREEDY, NUM_TOKENS, PROMPT, TwoModels, two_models
from tests.waiting import wait_until

RING = ("worker_proc", "scheduler_proc", "detok_proc", "tokenizer_proc")


def generate_forever(client: Client) -> None:
    while True:
        client.generate(PROMPT, GREEDY)


@pytest.fixture(scope="module")
def served(llama_dir: Path, gpt2_dir: Path) -> Iterator[TwoModels]:
    with two_models(llama_dir, gpt2_dir) as models:
        yield models


def test_a_request_gets_the_model_that_it_names(served: TwoModels) -> None:
    texts = {}
    for name in ("first", "second"):
        with served.client(name) as client:
            texts[name] = client.generate(PROMPT, GREEDY).text
        answer = served.complete(model=name, max_tokens=NUM_TOKENS)
        assert (answer["model"], answer["choices"][0]["text"]) == (name, texts[name])
    assert texts["first"] != texts["second"]
    for fields in ({}, {"model": "gpt-4o"}):  # the default one, and an alias
        answer = served.complete(max_tokens=NUM_TOKENS, **fields)
        assert (answer["model"], answer["choices"][0]["text"]) == ("first", texts["first"])


def test_an_unknown_model_is_refused_with_the_names_of_those_that_are_served(
    served: TwoModels,
) -> None:
    error = served.complete(model="third")["error"]
    assert error["code"] == "model_not_found"
    assert "'first' or 'second'" in error["message"]
    with (
        pytest.raises(InvalidRequest, match="use 'first', 'gpt-4o', 'second'"),
        served.client("third") as client,
    ):
        client.info()


def test_flags_of_one_model_are_not_those_of_the_other(served: TwoModels) -> None:
    sizes = {}
    for name in ("first", "second"):
        with served.client(name) as client:
            sizes[name] = client.info()["max_batch_size"]
    assert sizes == {"first": 64, "second": 4}


@pytest.mark.parametrize("program", RING)
def test_requests_of_both_models_go_on_where_a_process_of_one_dies(
    served: TwoModels, program: str
) -> None:
    async def run() -> None:
        endpoint = served.server.endpoint
        async with (
            AsyncClient(endpoint, model="first") as first,
            AsyncClient(endpoint, model="second") as second,
        ):
            expected = [(await client.generate(PROMPT, GREEDY)).text for client in (first, second)]
            asked = [
                asyncio.create_task(client.generate(PROMPT, GREEDY))
                for client in (first, second)
                for _ in range(3)
            ]
            await asyncio.sleep(0.05)
            os.kill(served.server.pid_of(f"{program}@second"), signal.SIGKILL)
            texts = [(await one).text for one in asked]
            assert texts == [expected[0]] * 3 + [expected[1]] * 3

    asyncio.run(asyncio.wait_for(run(), 60))


def test_a_model_whose_process_dies_too_often_is_lost_alone(
    llama_dir: Path, gpt2_dir: Path
) -> None:
    with two_models(llama_dir, gpt2_dir, "--max-restarts", "0") as served:
        server = served.server
        with served.client("first") as first, served.client("second") as second:
            expected = first.generate(PROMPT, GREEDY).text
            os.kill(server.pid_of("worker_proc@second"), signal.SIGKILL)
            with pytest.raises(ServerFailed, match="open requests of second are lost"):
                generate_forever(second)
            assert first.generate(PROMPT, GREEDY).text == expected
        wait_until(lambda: served.complete(model="second").get("error"), 10)
        error = served.complete(model="second")["error"]
        assert "worker_proc@second died (killed by SIGKILL)" in error["message"]
        assert served.complete(model="first", max_tokens=NUM_TOKENS)["choices"][0]["text"]
        assert all(server.pid_of(f"{program}@second") == 0 for program in RING)
        os.kill(server.pid_of("worker_proc@first"), signal.SIGKILL)
        assert server.process.wait(20) != 0


def kill_and_wait(server: Server, name: str) -> None:
    """Kill a process, and wait until it is gone."""
    pid = server.pid_of(name)
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: server.pid_of(name) != pid, 20)


def test_a_gateway_that_is_restarted_knows_that_a_model_is_lost(
    llama_dir: Path, gpt2_dir: Path
) -> None:
    with two_models(llama_dir, gpt2_dir, "--max-restarts", "1") as served:
        with served.client("second") as second:
            kill_and_wait(served.server, "worker_proc@second")
            second.generate(PROMPT, GREEDY)  # the new worker serves
            kill_and_wait(served.server, "worker_proc@second")
        wait_until(lambda: "error" in served.complete(model="second"), 20)
        kill_and_wait(served.server, "http_proc")
        wait_until(lambda: _answers(served), 20)
        assert "worker_proc@second died" in served.complete(model="second")["error"]["message"]
        assert served.get("/readyz") == {"status": "ready"}
        assert [model["id"] for model in served.get("/v1/models")["data"]] == ["first"]


def test_a_model_is_loaded_by_its_first_request_and_unloaded_when_it_is_idle(
    llama_dir: Path, gpt2_dir: Path
) -> None:
    flags = ("--sleep-idle-seconds", "1")
    with two_models(llama_dir, gpt2_dir, *flags, second={"preload": False}) as served:
        assert served.states() == {"first": "loaded", "second": "unloaded"}
        expected = served.complete(model="second", max_tokens=NUM_TOKENS)["choices"]
        wait_until(lambda: served.states()["second"] == "loaded", 20)
        wait_until(lambda: set(served.states().values()) == {"unloaded"}, 20)
        assert served.server.pid_of("worker_proc@second") == 0
        wait_until(lambda: served.server.pid_of("worker_proc.spare") != 0, 20)
        spare = served.server.pid_of("worker_proc.spare")
        assert served.complete(model="second", max_tokens=NUM_TOKENS)["choices"] == expected
        assert served.server.pid_of("worker_proc@second") == spare, "its command line is a worker's"
        assert served.post("/models/load", {"model": "first"}) == {"success": True}
        wait_until(lambda: served.states()["first"] == "loaded", 20)
        assert served.post("/models/unload", {"model": "gpt-4o"}) == {"success": True}
        assert served.states()["first"] == "unloaded"


def test_ollamas_keep_alive_loads_a_model_keeps_it_and_unloads_it(
    llama_dir: Path, gpt2_dir: Path
) -> None:
    flags = ("--sleep-idle-seconds", "1")
    with two_models(llama_dir, gpt2_dir, *flags, second={"preload": False}) as served:
        ask = {"model": "second", "stream": False, "keep_alive": -1}
        assert served.post("/api/generate", ask)["done_reason"] == "load"
        wait_until(lambda: served.states() == {"first": "unloaded", "second": "loaded"}, 20)
        (shown,) = served.get("/api/ps")["models"]
        assert shown["name"] == "second:latest" and shown["expires_at"].startswith("9999")
        assert shown["size"] > 50_000_000  # the process, with torch
        ask |= {"prompt": "a", "raw": True, "keep_alive": 0, "options": {"num_predict": 4}}
        assert served.post("/api/generate", ask)["done"]
        wait_until(lambda: served.states()["second"] == "unloaded", 20)
        assert served.get("/api/ps")["models"] == []


def test_the_only_model_of_a_server_is_unloaded_too(llama_dir: Path, tmp_path: Path) -> None:
    port = free_port()
    named = ["--model", str(llama_dir), "--served-model-name", "only", "--port", str(port)]
    with running_server(tmp_path / "log", *named, *FLAGS) as server:
        served = TwoModels(server, port)
        expected = served.complete()["choices"]
        assert served.post("/api/generate", {"model": "only", "keep_alive": 0})["done"]
        wait_until(lambda: served.states() == {"only": "unloaded"}, 20)
        assert served.get("/readyz") == {"status": "ready"}
        assert served.complete()["choices"] == expected
        wait_until(lambda: served.states() == {"only": "loaded"}, 20)


def test_models_for_which_there_is_no_room_take_turns_and_lose_nothing(
    llama_dir: Path, gpt2_dir: Path
) -> None:
    async def texts_of(client: AsyncClient, count: int) -> list[str]:
        asked = [client.generate([5, 6, number], GREEDY) for number in range(count)]
        return [one.text for one in await asyncio.gather(*asked)]

    async def run(endpoint: str) -> None:
        async with (
            AsyncClient(endpoint, model="first") as first,
            AsyncClient(endpoint, model="second") as second,
        ):
            clients = (first, second)
            expected = [await texts_of(client, 40) for client in clients]
            found = await asyncio.gather(*(texts_of(client, 40) for client in clients))
            assert found == expected
            infos = [await client.info() for client in clients]
            assert sum(info["kv_offload_loads_total"] for info in infos), "pages came back"

    flags = (
        "--model-memory",
        "0.21",
        "--model-turn",
        "0.5",
        "--max-batch-size",
        "4",
        "--mem-fraction-static",
        "0.001",
    )
    with two_models(llama_dir, gpt2_dir, *flags) as served:
        assert sorted(served.states().values()) == ["loaded", "unloaded"]
        asyncio.run(asyncio.wait_for(run(served.server.endpoint), 100))
        log = served.server.log.read_text()
        assert "suspended with" in log, "a busy model gave its turn up"


def test_the_models_of_a_directory_are_served_but_for_one_that_cannot_be(
    llama_dir: Path, gpt2_dir: Path, tmp_path: Path
) -> None:
    directory, port = tmp_path / "models", free_port()
    (directory / "broken").mkdir(parents=True)
    (directory / "broken" / "config.json").write_text("{}")
    (directory / "first").symlink_to(llama_dir)
    (directory / "second").symlink_to(gpt2_dir)
    flags = ["--models-dir", str(directory), "--port", str(port), *FLAGS]
    with running_server(tmp_path / "log", *flags) as server:
        served = TwoModels(server, port)
        assert set(served.states()) == {"first", "second"}
        assert served.complete(model="second")["choices"][0]["text"]
        with served.client("first") as client:
            assert client.generate(PROMPT, GREEDY).text
        assert "model broken is left out" in server.log.read_text()


NUM_CLIENTS = 8


def test_a_name_that_is_moved_under_load_drops_no_request(llama_dir: Path, gpt2_dir: Path) -> None:
    """Clients ask the alias without a pause, while it is moved by a canary and whole."""

    async def ask(session: aiohttp.ClientSession, url: str, number: int) -> tuple[str, str]:
        body = {"prompt": PROMPT, "max_tokens": 40, "temperature": 0, "ignore_eos": True,
                "model": "gpt-4o", "stream": number % 2 == 0}  # fmt: skip
        async with session.post(f"{url}/v1/completions", json=body) as response:
            assert response.status == 200, await response.text()
            if not body["stream"]:
                answer = await response.json()
                return answer["model"], answer["choices"][0]["text"]
            events = [
                json.loads(line.removeprefix(b"data: "))
                async for line in response.content
                if line.startswith(b"data: {")
            ]
            text = "".join(one["choices"][0]["text"] for one in events if one["choices"])
            return events[0]["model"], text

    async def run(served: TwoModels, expected: dict[str, str]) -> None:
        phase, answers = "blue", []
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(60)) as session:

            async def move(**fields: Any) -> None:
                body = {"alias": "gpt-4o", "model": "second", **fields}
                async with session.post(f"{served.url}/models/alias", json=body) as response:
                    assert response.status == 200, await response.text()

            async def client(number: int) -> None:
                while phase != "end":
                    began_in = phase
                    model, text = await ask(session, served.url, number)
                    assert text == expected[model]
                    answers.append((began_in, model))
                    number += NUM_CLIENTS + 1

            async def until(name: str, count: int) -> None:
                while sum(began_in == name for began_in, _ in answers) < count:
                    await asyncio.sleep(0.01)

            clients = asyncio.gather(*map(client, range(NUM_CLIENTS)))
            ends = asyncio.ensure_future(clients)
            await until("blue", 20)
            await move(canary=0.3)
            phase = "canary"
            await until("canary", 60)
            await move()
            phase = "green"
            await until("green", 30)
            phase = "end"
            await ends
        models = {name: {m for began_in, m in answers if began_in == name} for name, _ in answers}
        assert models["canary"] == {"first", "second"}
        assert models["green"] == {"second"}

    with two_models(llama_dir, gpt2_dir) as served:
        texts = {
            name: served.complete(model=name, max_tokens=40)["choices"][0]["text"]
            for name in ("first", "second")
        }
        asyncio.run(asyncio.wait_for(run(served, texts), 100))
        kill_and_wait(served.server, "http_proc")
        wait_until(lambda: _answers(served), 20)
        assert served.complete(model="gpt-4o")["model"] == "second"
        with served.client("gpt-4o") as client:  # a frontend knows it, too
            assert client.generate(PROMPT, GREEDY).text.startswith(texts["second"])


def _answers(served: TwoModels) -> bool:
    with suppress(OSError):
        return "choices" in served.complete(model="first")
    return False
