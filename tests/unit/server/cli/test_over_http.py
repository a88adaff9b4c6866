"""`quadriga ask`, `chat` and `models` by HTTP, with a key, at a gateway before a scripted ring."""

import asyncio
import builtins
import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from http_proc.apis.model_states import MODEL_STATES, ModelStates, set_states
from http_proc.core.gateway import Gateway
from quadriga.client import Client
from quadriga.errors import PromptTooLong, QuadrigaError, RequestFailed
from quadriga.sampling.params import SamplingParams
from quadriga.server.answer_format import AnswerFormat, ReasoningFormat, to_info
from quadriga.server.cli import chat
from quadriga.server.cli.main import EXIT_FAILED, EXIT_OK, main
from quadriga.server.cli.server_api import GatewayClient
from tests.unit.scripted_ring import ScriptedRing, gateway_before

KEY = "sekrit"
Command = Callable[..., int]


def run(ring: ScriptedRing, test: Callable[[Command, str], None]) -> None:
    """Run a test with a function that runs a command against a gateway that needs KEY."""

    async def at_gateway() -> None:
        async with gateway_before(ring, api_key=KEY) as (url, _):

            def quadriga(command: str, *arguments: str, key: str = KEY) -> int:
                return main([command, "--endpoint", url, "--api-key", key, *arguments])

            await asyncio.to_thread(test, quadriga, url)

    asyncio.run(asyncio.wait_for(at_gateway(), 60))


def test_an_answer_comes_with_its_timings(capsys: pytest.CaptureFixture[str]) -> None:
    ring = ScriptedRing(["No", " rain."])

    def test(quadriga: Command, url: str) -> None:
        assert quadriga("ask", "--timings", "--max-new-tokens", "9", "--seed", "7", "Rain?") == 0
        out, err = capsys.readouterr()
        assert out == "No rain.\n"
        assert re.search(r"^first token \d+ ms · .*total .* · 3 prompt tokens", err)

    run(ring, test)
    ((prompt, params, _),) = ring.submitted
    assert [turn["content"] for turn in prompt] == ["Rain?"]
    assert (params.max_new_tokens, params.temperature, params.seed) == (9, 0.0, 7)


@pytest.mark.parametrize(("plain", "has_chat"), [(True, True), (False, False)])
def test_a_text_is_continued_where_there_is_no_chat(
    plain: bool, has_chat: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    ring = ScriptedRing([" upon a time"], chat=has_chat)

    def test(quadriga: Command, url: str) -> None:
        assert quadriga("ask", *["--plain"] * plain, "Once") == EXIT_OK
        assert capsys.readouterr().out == " upon a time\n"

    run(ring, test)
    assert ring.submitted[-1][0] == "Once"


def test_a_wrong_key_is_an_error_that_says_how_to_send_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def test(quadriga: Command, url: str) -> None:
        for command in (("ask", "Hi"), ("chat",)):
            assert quadriga(*command, key="wrong") == EXIT_FAILED
            assert "401 for /v1/models: no valid API key" in capsys.readouterr().err

    run(ScriptedRing([]), test)


def test_the_key_comes_from_the_environment_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("QUADRIGA_API_KEY", f"{KEY},other")

    def test(quadriga: Command, url: str) -> None:
        assert main(["ask", "--endpoint", url, "Hi"]) == EXIT_OK
        assert capsys.readouterr().out == "Yes.\n"

    run(ScriptedRing(["Yes."]), test)


def test_a_chat_keeps_its_turns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ring, lines = ScriptedRing(["Yes."]), iter(["one", "two", "/quit"])
    monkeypatch.setattr(builtins, "input", lambda _: next(lines))

    def test(quadriga: Command, url: str) -> None:
        assert quadriga("chat", "--system", "be brief") == EXIT_OK
        out, err = capsys.readouterr()
        assert out == "Yes.\nYes.\n" and err.startswith(f"tiny at {url} · ")

    run(ring, test)
    last = [turn["content"] for turn in ring.submitted[-1][0]]
    assert last == ["be brief", "one", "Yes.", "two"]


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (PromptTooLong("prompt has 9 tokens"), PromptTooLong, "prompt has 9 tokens"),
        (RequestFailed("the worker died"), QuadrigaError, "the worker died"),
    ],
)
def test_an_error_of_the_server_is_raised(
    error: QuadrigaError, kind: type[QuadrigaError], words: str
) -> None:
    ring = ScriptedRing([])
    ring.error = error

    def test(quadriga: Command, url: str) -> None:
        client = GatewayClient(url, KEY, print)
        with pytest.raises(kind, match=words):
            list(client.stream([{"role": "user", "content": "Hi"}]))

    run(ring, test)


def test_a_reasoning_is_no_part_of_the_answer() -> None:
    thinking = to_info(AnswerFormat(reasoning=ReasoningFormat()))
    ring = ScriptedRing(["<think>Hm", "m.</think>", "No", "."], answer_format=thinking)
    reasoning: list[str] = []

    def test(quadriga: Command, url: str) -> None:
        client = GatewayClient(url, KEY, reasoning.append)
        *chunks, last = client.stream([{"role": "user", "content": "Rain?"}], SamplingParams())
        assert "".join(chunk.text for chunk in chunks) == "No."
        assert last.completion is not None and last.completion.text == "No."

    run(ring, test)
    assert "".join(reasoning).strip() == "Hmm."


def test_an_answer_that_is_left_is_aborted() -> None:
    ring = ScriptedRing(["a", "b"])
    ring.leaves_open = True

    def test(quadriga: Command, url: str) -> None:
        answer: Any = GatewayClient(url, KEY, print).stream("Once")
        assert next(answer).text == "a"
        answer.close()

    run(ring, test)
    assert ring.handles[0].aborted


def test_the_list_of_models_names_the_served_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("quadriga.server.cli.models.local_models", list)

    def test(quadriga: Command, url: str) -> None:
        assert quadriga("models") == EXIT_OK
        assert capsys.readouterr().out.splitlines()[1].startswith(f"tiny  served at {url}")

    run(ScriptedRing([]), test)


def test_without_a_zeromq_socket_the_web_address_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    nowhere = Client("ipc:///nowhere", connect_timeout=0.05)
    monkeypatch.setattr(chat, "Client", lambda *_, **__: nowhere)
    assert main(["ask", "Hi"]) == EXIT_FAILED
    assert "try --endpoint http://127.0.0.1:8000 --api-key KEY" in capsys.readouterr().err


def of_several(test: Callable[[Command, Gateway], None]) -> dict[str, ScriptedRing]:
    """Run a test at a gateway of models a and b, which do what they are asked for."""
    rings = {
        "a": ScriptedRing(["from a"], open_requests=0),
        "b gpt-4o": ScriptedRing(["from b"], open_requests=0),
    }

    async def at_gateway() -> None:
        async with gateway_before(rings) as (url, gateway):
            loop = asyncio.get_running_loop()

            def wish(name: str, loaded: bool) -> None:
                state = "loaded" if loaded else "unloaded"
                loads = json.dumps({name: {"state": state}})
                loop.call_later(0.3, set_states, gateway, loads)

            gateway[MODEL_STATES] = ModelStates(wish)

            def quadriga(command: str, *arguments: str) -> int:
                return main([command, *arguments, "--endpoint", url])

            await asyncio.to_thread(test, quadriga, gateway)

    asyncio.run(asyncio.wait_for(at_gateway(), 60))
    return rings


def test_models_of_a_server_are_listed_loaded_and_unloaded(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def test(quadriga: Command, gateway: Gateway) -> None:
        def shown(*arguments: str) -> list[str]:
            assert quadriga("models", *arguments) == EXIT_OK
            return capsys.readouterr().out.splitlines()

        listed = ["name  state   aliases", "a     loaded", "b     loaded  gpt-4o"]
        assert shown("list") == listed
        assert shown("unload", "gpt-4o") == ["gpt-4o is unloaded"]
        assert shown("list")[2] == "b     unloaded  gpt-4o"
        assert json.loads("".join(shown("load", "b", "--json"))) == {"id": "b", "state": "loaded"}
        assert shown("list") == listed
        assert shown("load", "a") == ["a is loaded"]  # it is already
        assert [row.split()[0] for row in shown()[-2:]] == ["a", "b"]
        assert quadriga("models", "load", "c") == EXIT_FAILED
        assert "model 'c' is not served there: use one of 'a', 'b'" in capsys.readouterr().err
        next(iter(gateway.models)).client.facts["open_requests"] = 3  # type: ignore[attr-defined]
        assert quadriga("models", "unload", "a", "--wait", "0.3") == EXIT_FAILED
        assert "409 for /models/unload" in capsys.readouterr().err

    of_several(test)
    assert main(["models", "list", "--endpoint", "tcp://127.0.0.1:1"]) == EXIT_FAILED
    assert "give the web address" in capsys.readouterr().err


def test_ask_takes_the_model_that_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    def test(quadriga: Command, _: Gateway) -> None:
        for name in ("b", "gpt-4o"):
            assert quadriga("ask", "--model", name, "Rain?") == EXIT_OK
            assert capsys.readouterr().out == "from b\n"
        assert quadriga("ask", "Rain?") == EXIT_OK
        assert capsys.readouterr().out == "from a\n"
        assert quadriga("ask", "--model", "c", "Rain?") == EXIT_FAILED
        assert "use 'a' or 'b'" in capsys.readouterr().err

    rings = of_several(test)
    assert [len(ring.submitted) for ring in rings.values()] == [1, 2]


@pytest.mark.parametrize("command", ["ask", "chat"])
def test_a_model_is_chosen_at_a_zeromq_socket(
    command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def client(endpoint: str, *, curve_dir: str | None, model: str) -> None:
        asked.append(model)
        raise RequestFailed("enough")

    monkeypatch.setattr(chat, "Client", client)
    assert main([command, "--model", "b", *(["Hi"] if command == "ask" else [])]) == EXIT_FAILED
    assert asked == ["b"]
