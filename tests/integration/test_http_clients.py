"""Unmodified clients against the gateway: openai's helpers, LangChain, LiteLLM.

The model has random weights, so a grammar forces every answer that must be meaningful.
"""

import asyncio
import json
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pydantic
import pytest

from tests.gateway import MODEL, running_gateway
from tests.server import running_server
from tests.tiny_models import CHAT_TEMPLATE, tiny_llama

WITHOUT = "comes with pip install -e '.[clients]'"
TOOLS_IN_FRONT = "{% for tool in tools or [] %}{{ tool.function.name }} <tool_call> {% endfor %}"
HELLO: Any = [{"role": "user", "content": "Hello!"}]


class Weather(pydantic.BaseModel):
    """The weather of a city."""

    model_config = pydantic.ConfigDict(extra="forbid")
    city: Literal["Rome", "Oslo"]
    days: Literal[1, 2, 3]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Yield the URL of a gateway whose model has a chat template with tools."""
    directory = tiny_llama(tmp_path_factory.mktemp("with-tools"), max_position_embeddings=1024)
    path = directory / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    path.write_text(json.dumps(settings | {"chat_template": TOOLS_IN_FRONT + CHAT_TEMPLATE}))
    flags = ["--model", str(directory), "--dtype", "float32", "--worker-threads", "1"]
    log = tmp_path_factory.mktemp("clients") / "log"
    with (
        running_server(log, *flags) as server,
        running_gateway(server.endpoint, directory) as address,
    ):
        yield f"{address}/v1"


# --- openai ---------------------------------------------------------------------------------------


@pytest.fixture
def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=30)


def test_openais_parse_gives_the_object_that_was_asked_for(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(
        model=MODEL, messages=HELLO, response_format=Weather, seed=1
    )
    assert isinstance(answer.choices[0].message.parsed, Weather)


def test_openais_parse_gives_the_arguments_of_a_strict_tool(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(
        model=MODEL,
        messages=HELLO,
        tools=[openai.pydantic_function_tool(Weather)],
        tool_choice="required",
        seed=1,
    )
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.tool_calls
    assert isinstance(choice.message.tool_calls[0].function.parsed_arguments, Weather)


def test_a_strict_tool_that_need_not_be_called_is_taken(client: openai.OpenAI) -> None:
    tool: Any = openai.pydantic_function_tool(Weather)
    answer = client.chat.completions.create(
        model=MODEL, messages=HELLO, tools=[tool], seed=1, max_tokens=20
    )
    assert answer.choices[0].finish_reason in ("length", "stop", "tool_calls")


def test_openais_streaming_helper_collects_a_call(client: openai.OpenAI) -> None:
    tool: Any = openai.pydantic_function_tool(Weather)
    with client.chat.completions.stream(
        model=MODEL, messages=HELLO, tools=[tool], tool_choice="required", seed=2
    ) as stream:
        kinds = {event.type for event in stream}
        message = stream.get_final_completion().choices[0].message
    assert "tool_calls.function.arguments.done" in kinds
    assert message.tool_calls
    Weather.model_validate_json(message.tool_calls[0].function.arguments)


def test_openais_models_and_raw_answers(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    raw = client.completions.with_raw_response.create(model=MODEL, prompt="a", max_tokens=1)
    assert raw.headers["x-request-id"] in raw.parse().id


# --- LangChain ------------------------------------------------------------------------------------


@pytest.fixture
def chat(url: str) -> Any:
    langchain = pytest.importorskip("langchain_openai", reason=f"langchain-openai {WITHOUT}")
    return langchain.ChatOpenAI(
        model=MODEL, base_url=url, api_key="none", max_retries=0, timeout=30, max_tokens=12, seed=3
    )


def test_langchain_invokes_streams_and_batches_alike(chat: Any) -> None:
    greedy = chat.bind(temperature=0)
    whole = greedy.invoke("Hello!")
    assert whole.usage_metadata["output_tokens"] <= 12
    assert "".join(part.content for part in greedy.stream("Hello!")) == whole.content
    assert [answer.content for answer in greedy.batch(["Hello!", "Hello!"])] == [whole.content] * 2

    async def both() -> tuple[str, str]:
        parts = [part.content async for part in greedy.astream("Hello!")]
        return "".join(parts), (await greedy.ainvoke("Hello!")).content

    assert asyncio.run(both()) == (whole.content, whole.content)


def test_langchain_has_structured_output_tools_logprobs_and_choices(chat: Any) -> None:
    messages = pytest.importorskip("langchain_core.messages", reason=f"langchain {WITHOUT}")
    long = chat.model_copy(update={"max_tokens": 500})
    for method in ("json_schema", "function_calling"):
        parsed = long.with_structured_output(Weather, method=method).invoke("Rain?")
        assert isinstance(parsed, Weather), method
    call, *_ = long.bind_tools([Weather], tool_choice="any").invoke("Rain?").tool_calls
    Weather.model_validate(call["args"])
    logprobs = (
        chat.bind(logprobs=True, top_logprobs=2).invoke("Hello!").response_metadata["logprobs"]
    )
    assert len(logprobs["content"][0]["top_logprobs"]) == 2
    prompt = messages.HumanMessage("Hello!")
    assert len(chat.model_copy(update={"n": 2}).generate([[prompt]]).generations[0]) == 2


def test_langchain_completes_texts(url: str) -> None:
    langchain = pytest.importorskip("langchain_openai", reason=f"langchain-openai {WITHOUT}")
    llm = langchain.OpenAI(
        model=MODEL, base_url=url, api_key="none", max_retries=0, max_tokens=8, temperature=0
    )
    whole = llm.invoke("The quick")
    assert whole and "".join(llm.stream("The quick")) == whole


# --- LiteLLM --------------------------------------------------------------------------------------


@pytest.fixture
def litellm(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    return pytest.importorskip("litellm", reason=f"litellm {WITHOUT}")


@pytest.fixture
def asked(url: str) -> dict[str, Any]:
    return {"model": f"openai/{MODEL}", "messages": HELLO, "api_base": url, "api_key": "none",
            "max_tokens": 12, "seed": 3, "num_retries": 0, "timeout": 30}  # fmt: skip


def test_litellm_answers_whole_streamed_and_asynchronously_alike(
    litellm: Any, asked: dict[str, Any]
) -> None:
    greedy = asked | {"temperature": 0}
    whole = litellm.completion(**greedy).choices[0].message.content
    parts = litellm.completion(**greedy, stream=True)
    assert "".join(part.choices[0].delta.content or "" for part in parts) == whole
    from_coroutine = asyncio.run(litellm.acompletion(**greedy))
    assert from_coroutine.choices[0].message.content == whole
    assert from_coroutine.usage.completion_tokens <= 12


def test_litellm_has_tools_schemas_and_errors(litellm: Any, asked: dict[str, Any]) -> None:
    long = asked | {"max_tokens": 500}
    tool = openai.pydantic_function_tool(Weather)
    answer = litellm.completion(**long, tools=[tool], tool_choice="required")
    call, *_ = answer.choices[0].message.tool_calls
    Weather.model_validate_json(call.function.arguments)
    answer = litellm.completion(**long, response_format=Weather)
    Weather.model_validate_json(answer.choices[0].message.content)
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(**asked | {"max_tokens": 10_000})
    with pytest.raises(litellm.BadRequestError):
        litellm.completion(**asked, temperature=-1)


def test_litellm_completes_texts(litellm: Any, asked: dict[str, Any]) -> None:
    text = asked | {"model": f"text-completion-openai/{MODEL}", "prompt": "The quick"}
    del text["messages"]
    answer = litellm.text_completion(**text, logprobs=1)
    assert answer.choices[0].text and answer.choices[0].logprobs
