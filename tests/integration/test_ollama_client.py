"""The unmodified client of Ollama against the gateway, with the built-in model."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from quadriga.errors import ModelError
from quadriga.server.models.sources import builtin_weights
from tests.gateway import MODEL, running_gateway
from tests.server import running_server

BUILTIN = "smollm2-135m"
GREEDY = {"temperature": 0, "num_predict": 40}
FRANCE: Any = [{"role": "user", "content": "What is the capital of France?"}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'

pytestmark = pytest.mark.timeout(180)


def imported() -> Any:
    return pytest.importorskip("ollama", reason="ollama comes with pip install -e '.[clients]'")


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    try:
        builtin_weights(show_progress=False)
    except ModelError as error:
        pytest.skip(str(error))
    log = tmp_path_factory.mktemp("ollama") / "log"
    flags = ["--model", BUILTIN, "--dtype", "float32", "--max-total-tokens", "8192"]
    with (
        running_server(log, *flags) as server,
        running_gateway(server.endpoint, BUILTIN) as address,
    ):
        yield address


@pytest.fixture(scope="module")
def client(request: pytest.FixtureRequest) -> Any:
    ollama = imported()  # before the server is started
    return ollama.Client(request.getfixturevalue("url"), timeout=60)


def weather(city: str) -> str:
    """Return the weather of a city.

    Args:
        city: Name of the city.
    """
    return f"It is 21 degrees and sunny in {city}."


def test_a_chat_has_the_same_text_whole_and_streamed(client: Any) -> None:
    whole = client.chat(MODEL, FRANCE, options=GREEDY)
    assert "Paris" in whole.message.content and whole.done_reason == "stop"
    assert whole.total_duration > whole.eval_duration > 0 < whole.prompt_eval_duration
    parts = list(client.chat(f"{MODEL}:latest", FRANCE, stream=True, options=GREEDY))
    assert "".join(part.message.content for part in parts) == whole.message.content
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    assert parts[-1].eval_count == whole.eval_count


def test_a_prompt_is_completed_whole_streamed_raw_and_after_a_context(client: Any) -> None:
    whole = client.generate(MODEL, "Say hi.", options=GREEDY, context=[])
    parts = client.generate(MODEL, "Say hi.", options=GREEDY, stream=True)
    assert "".join(part.response for part in parts) == whole.response != ""
    assert len(whole.context) == whole.prompt_eval_count + whole.eval_count
    raw = client.generate(MODEL, "The capital of France is", raw=True, options=GREEDY)
    assert "Paris" in raw.response
    after = client.generate(MODEL, "Again.", options=GREEDY, context=whole.context)
    assert after.prompt_eval_count > len(whole.context)


def test_the_model_calls_a_python_function_and_uses_its_answer(client: Any) -> None:
    messages: list[Any] = [{"role": "user", "content": f"Repeat this text: {CALL}"}]
    asking = client.chat(MODEL, messages, tools=[weather], options=GREEDY).message
    (call,) = asking.tool_calls
    result = {"weather": weather}[call.function.name](**call.function.arguments)
    messages += [asking, {"role": "tool", "content": result, "tool_name": "weather"}]
    answer = client.chat(MODEL, messages, tools=[weather], options=GREEDY).message
    assert "21 degrees and sunny in Paris" in answer.content
    streamed = list(client.chat(MODEL, messages[:1], tools=[weather], options=GREEDY, stream=True))
    calls = [call for part in streamed for call in part.message.tool_calls or []]
    assert [call.function for call in calls] == [call.function]


def test_an_answer_obeys_a_schema_and_has_logprobs(client: Any) -> None:
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]}
    answer = client.chat(
        MODEL, FRANCE, format=schema, logprobs=True, top_logprobs=2, options=GREEDY
    )
    assert json.loads(answer.message.content) in ({"n": 1}, {"n": 2})
    assert len(answer.logprobs) == answer.eval_count
    assert len(answer.logprobs[0].top_logprobs) == 2


def test_the_model_is_listed_shown_and_loaded(client: Any) -> None:
    (listed,) = client.list().models
    (loaded,) = client.ps().models
    assert listed.model == loaded.model == f"{MODEL}:latest"
    shown = client.show(MODEL)
    assert shown.capabilities == ["completion", "tools"]
    assert shown.modelinfo["llama.context_length"] == loaded.context_length == 8192
    assert shown.details.quantization_level == listed.details.quantization_level == "Q4_1"


@pytest.mark.parametrize(
    ("method", "arguments", "status", "said"),
    [
        ("chat", {"model": "other", "messages": FRANCE}, 404, "is not served"),
        ("generate", {"prompt": "x", "suffix": "y"}, 400, "fim_prefix"),
        ("chat", {"messages": FRANCE, "options": {"temperature": -1}}, 400, "temperature"),
        ("embed", {"input": "x"}, 501, "computes no embeddings"),
        ("pull", {}, 501, "start it with --model"),
        ("delete", {}, 501, "deletes no models"),
    ],
)
def test_errors_have_a_status_and_a_remedy(
    client: Any, method: str, arguments: dict[str, Any], status: int, said: str
) -> None:
    with pytest.raises(imported().ResponseError, match=said) as failed:
        getattr(client, method)(**{"model": MODEL} | arguments)
    assert failed.value.status_code == status


@pytest.mark.parametrize("provider", ["ollama_chat", "ollama"])
def test_litellm_speaks_this_api_too(
    provider: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    litellm: Any = pytest.importorskip(
        "litellm", reason="litellm comes with pip install -e '.[clients]'"
    )
    asked = {"model": f"{provider}/{MODEL}", "api_base": request.getfixturevalue("url")}
    asked |= {"messages": FRANCE, "temperature": 0, "max_tokens": 20, "timeout": 60}
    whole = litellm.completion(**asked).choices[0].message.content
    parts = litellm.completion(**asked, stream=True)
    assert "".join(part.choices[0].delta.content or "" for part in parts) == whole
    assert "Paris" in whole
