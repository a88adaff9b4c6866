"""Resumable HTTP streams: connections that are cut, and deaths of processes, cost no event."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import openai
import pytest
from openai.types.chat import ChatCompletionChunk

from bench.client.server import free_port
from tests.faults.kill_matrix import main
from tests.faults.resumed_streams import ResumedStreams, WrongStream
from tests.server import ROOT, Server, running_server, settle
from tests.tcp_proxy import PAUSE_S, TcpProxy, cut_connections
from tests.waiting import wait_until

NUM_STREAMS = 32
TIMEOUT_S = 60.0


@pytest.fixture(scope="module")
def web_server(
    llama_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Server, str]]:
    """A server with a gateway, and the gateway's URL."""
    port, directory = free_port(), tmp_path_factory.mktemp("web")
    flags = ["--model", str(llama_dir), "--dtype", "float32", "--worker-threads", "1",
             "--max-total-tokens", "16384", "--port", str(port),
             "--data-dir", str(directory / "data")]  # fmt: skip
    with running_server(directory / "log", *flags) as server:
        yield server, f"http://127.0.0.1:{port}"


async def while_cutting(url: str, seed: int) -> tuple[list[object], int]:
    """Return the answers of streams whose connections are cut, and the number of connections."""
    async with cut_connections(url, seed) as proxy_url:
        load = ResumedStreams(proxy_url, TIMEOUT_S, NUM_STREAMS)
        answers: list[object] = list(await load.run())
    return answers, load.num_resumed


@pytest.mark.timeout(200)
def test_streams_that_are_cut_several_times_a_second_have_every_event_once(
    web_server: tuple[Server, str],
) -> None:
    server, url = web_server
    expected = asyncio.run(ResumedStreams(url, TIMEOUT_S, NUM_STREAMS).run())
    assert not [answer for answer in expected if isinstance(answer, WrongStream)]
    for seed in range(2):
        answers, num_resumed = asyncio.run(while_cutting(url, seed))
        assert [n for n in range(NUM_STREAMS) if answers[n] != expected[n]] == []
        assert num_resumed > NUM_STREAMS
        print(f"{num_resumed} connections beside the first {NUM_STREAMS}")
    wait_until(lambda: settle(server.endpoint)["open_requests"] == 0, TIMEOUT_S)


def test_the_openai_client_resumes_a_chat(web_server: tuple[Server, str]) -> None:
    """As docs/streams.md shows it; each chunk is one event."""
    _, url = web_server
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")

    def chat(name: str) -> openai.Stream[ChatCompletionChunk]:
        return client.chat.completions.create(
            model=client.models.list().data[0].id,
            messages=[{"role": "user", "content": "word"}],
            stream=True,
            temperature=0,
            max_tokens=30,
            extra_headers={"X-Request-Id": name, "X-Resumable": "true"},
        )

    def rest(name: str, num_read: int) -> openai.Stream[ChatCompletionChunk]:
        return client.get(
            f"/streams/{name}",
            cast_to=ChatCompletionChunk,
            stream=True,
            stream_cls=openai.Stream[ChatCompletionChunk],
            options={"params": {"starting_after": num_read}},
        )

    whole = [chunk.to_json() for chunk in chat("whole")]
    assert [chunk.to_json() for chunk in chat("whole")] == whole
    for num_read in range(len(whole) + 1):
        assert [chunk.to_json() for chunk in rest("whole", num_read)] == whole[num_read:]


def example() -> Any:
    """Return the function of docs/streams.md."""
    text = (ROOT / "docs" / "streams.md").read_text()
    source = text.partition("```python\n")[2].partition("\nclient = ")[0]
    names: dict[str, Any] = {}
    exec(source, names)
    return names["chat_chunks"]


def test_the_example_of_the_documentation_survives_cuts(web_server: tuple[Server, str]) -> None:
    _, url = web_server
    fields = {"model": "", "messages": [{"role": "user", "content": "word"}],
              "temperature": 0, "max_tokens": 200}  # fmt: skip
    fields["model"] = openai.OpenAI(base_url=f"{url}/v1", api_key="none").models.list().data[0].id

    def texts(base_url: str, name: str) -> list[str]:
        client = openai.OpenAI(base_url=f"{base_url}/v1", api_key="none")
        return [chunk.choices[0].delta.to_json() for chunk in example()(client, name, **fields)]

    async def through_a_proxy() -> list[str]:
        proxy = TcpProxy()
        async with proxy.open(f"tcp://{urlsplit(url).netloc}") as endpoint:
            reading = asyncio.ensure_future(
                asyncio.to_thread(texts, endpoint.replace("tcp", "http"), "cut")
            )
            while not reading.done():
                await asyncio.sleep(PAUSE_S / 2)
                proxy.cut()
            return await reading

    assert asyncio.run(through_a_proxy()) == texts(url, "uncut")


@pytest.mark.timeout(300)
def test_a_gateway_or_a_whole_server_that_dies_costs_no_event() -> None:
    flags = ["--rounds", "1", "--signals", "SIGKILL", "--moments", "http", "--watchdog", "30"]
    assert main([*flags, "--processes", "http_proc", "all"]) == 0
