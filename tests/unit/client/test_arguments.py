"""What a caller reads who gives a client a wrong argument."""

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from bench.client.server import free_port
from quadriga import AsyncClient, Client, SamplingParams
from quadriga.client.types import (
    Completion,
    Prompt,
    Timings,
    check_is_chat,
    params_of_each,
    wire_prompt,
)
from quadriga.errors import ConfigError, InvalidRequest, ServerUnreachable
from quadriga.wire.client import Usage
from tests.unit.fake_server import FakeServer


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Client]:
    server = FakeServer(f"tcp://127.0.0.1:{free_port()}")
    server.start()
    with Client(server.endpoint) as client:
        yield client
    server.stopping = True
    server.join(5)


# --- SamplingParams -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"temperature": "hot"}, InvalidRequest, "temperature is 'hot': expected float or None"),
        ({"stop": ["a", 1]}, InvalidRequest, r"stop is \['a', 1\]: expected str, got int, at \[1"),
        ({"temprature": 1}, TypeError, "no keyword 'temprature'; near it: temperature"),
        ({"max_tokens": 5, "max_new_tokens": 6}, InvalidRequest, "two names of one limit"),
        ({"max_tokens": "5"}, InvalidRequest, "max_tokens is '5': expected int or None"),
    ],
)
def test_a_wrong_field_of_sampling_params_is_named(
    fields: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        SamplingParams(**fields)


def test_max_tokens_is_another_name_of_max_new_tokens() -> None:
    params = SamplingParams(max_tokens=5)
    assert (
        params == SamplingParams(max_new_tokens=5) == SamplingParams(max_tokens=5, max_new_tokens=5)
    )
    assert params.max_tokens == 5
    assert SamplingParams(max_tokens=None).max_tokens is None


def test_sampling_params_take_keywords_only() -> None:
    with pytest.raises(TypeError, match=r"SamplingParams\(max_tokens=64, …\)"):
        SamplingParams({"seed": 1})  # type: ignore[call-arg, arg-type]


# --- calls ----------------------------------------------------------------------------------------

MISTAKES: list[tuple[Callable[[Any], Any], type[Exception], str]] = [
    (lambda c: c.generate("a", temperature=0), TypeError,
     r"generate\(\) has no keyword 'temperature': it is a field of SamplingParams"),
    (lambda c: c.generate("a", max_tokens=5), TypeError, r"SamplingParams\(max_tokens=…\)"),
    (lambda c: c.generate("a", timeuot=5), TypeError, "'timeuot'; near it: timeout"),
    (lambda c: c.generate("a", sampling_params=None), TypeError, "called params here"),
    (lambda c: c.generate("a", {"seed": 1}), InvalidRequest, "params is {'seed': 1}, a dict"),
    (lambda c: c.generate(["a"], [None, None]), InvalidRequest, "a list of 2 for 1 prompts"),
    (lambda c: c.generate(5), InvalidRequest, "prompt is 5, an int: it must be a string"),
    (lambda c: c.generate(None), InvalidRequest, "prompt is None, a NoneType"),
    (lambda c: c.generate([{"role": "usr", "content": "a"}]), InvalidRequest,
     "turn 0 of the chat has the role 'usr': is it 'user'"),
    (lambda c: c.generate([{"content": "a"}]), InvalidRequest,
     "turn 0 is {'content': 'a'}, a dict: object missing required field role"),
    (lambda c: list(c.stream("a", top_p=1)), TypeError, r"stream\(\) has no keyword 'top_p'"),
    (lambda c: list(c.stream("a", {"seed": 1})), InvalidRequest, "params is"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "error", "message"), MISTAKES)
def test_a_wrong_argument_is_named_in_the_callers_words(
    client: Client, call: Callable[[Any], Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        call(client)


def test_roles_of_other_templates_pass() -> None:
    assert wire_prompt([{"role": "ipython", "content": ""}]).prompt
    assert wire_prompt([{"role": "critic", "content": ""}]).prompt


def test_no_prompts_give_no_completions(client: Client) -> None:
    prompts: list[Prompt] = []
    assert client.generate(prompts) == []


def test_each_prompt_of_a_list_has_its_own_parameters() -> None:
    one, two = SamplingParams(seed=1), SamplingParams(seed=2)
    assert params_of_each([one, two], 2) == [one, two]
    assert params_of_each(one, 2) == [one, one]
    assert params_of_each(None, 1) == [SamplingParams()]


@pytest.mark.parametrize("messages", ["hello", ["a"], [["a"]], {"role": "user"}, None, [[]]])
def test_what_is_no_chat_is_refused(messages: Any) -> None:
    with pytest.raises(InvalidRequest, match="a chat is a list of maps"):
        check_is_chat(messages)


def test_a_chat_and_a_list_of_chats_or_of_none_pass() -> None:
    chat = [{"role": "user", "content": "a"}]
    check_is_chat(chat)
    check_is_chat([chat, chat])
    check_is_chat([])


# --- the endpoint ---------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [Client, AsyncClient])
def test_a_web_address_is_refused_at_once(make: Any) -> None:
    with pytest.raises(ConfigError, match="a web address, which OpenAI clients use"):
        make("http://127.0.0.1:8000")


class Page(BaseHTTPRequestHandler):
    text = b""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(self.text)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.mark.parametrize(
    ("text", "where"),
    [
        (b'{"endpoint": "tcp://127.0.0.1:5999"}', "is tcp://127.0.0.1:5999"),
        (b"<p>another server</p>", "is tcp://127.0.0.1:5555 by default"),
        (b"[]", "is tcp://127.0.0.1:5555 by default"),
    ],
)
def test_the_port_of_a_web_server_is_recognized(
    monkeypatch: pytest.MonkeyPatch, text: bytes, where: str
) -> None:
    monkeypatch.setattr(Page, "text", text)
    with ThreadingHTTPServer(("127.0.0.1", 0), Page) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            client = Client(f"tcp://127.0.0.1:{server.server_port}")
            with (
                closing(client),
                pytest.raises(ServerUnreachable, match=f"an HTTP port: the ZMQ endpoint.* {where}"),
            ):
                client.info(timeout=30)
        finally:
            server.shutdown()


def test_a_silent_port_is_no_web_server() -> None:
    async def connect(endpoint: str) -> None:
        await AsyncClient(endpoint, connect_timeout=0.5).connect()

    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(ServerUnreachable, match=r"within 0\.5 s"):
            asyncio.run(connect(endpoint))


# --- the completion -------------------------------------------------------------------------------


def test_durations_are_derived_from_the_times() -> None:
    timings = Timings(10.0, 10.1, 10.2, 10.5, 10.75, 11.75, 12.0, [10.75, 11.0, 11.75])
    assert timings.queue == pytest.approx(0.3)
    assert (timings.ttft, timings.tpot, timings.total) == (0.75, 0.5, 2.0)
    never = Timings(10.0, delivered=11.0)
    assert (never.queue, never.ttft, never.tpot, never.total) == (None, None, None, 1.0)


def test_the_repr_of_a_completion_is_short() -> None:
    timings = Timings(10.0, 10.1, 10.2, 10.5, 10.75, 11.75, 12.0, [10.75])
    done = Completion("id", "Paris.", [1, 2], "stop", Usage(5, 2), timings)
    done.text, done.others = "Paris." * 99, [done]
    assert len(repr(done)) < 160
    done.text, done.others = "Paris.", []
    assert repr(done) == "Completion('Paris.', stop, 2 tokens, ttft 0.750 s, total 2.000 s)"
