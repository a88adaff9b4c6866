"""The unmodified `anthropic` package, and LangChain on top of it, against the built-in model."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pydantic
import pytest

from tests.gateway import MODEL, running_gateway
from tests.server import running_server
from tests.unit.claude_code import claude_code_request

WITHOUT = "comes with pip install -e '.[clients]'"
anthropic: Any = pytest.importorskip("anthropic", reason=f"anthropic {WITHOUT}")

BUILT_IN = "smollm2-135m"
# The model's own template, and a switch by which the answer begins in the reasoning.
TEMPLATE = """{% for message in messages %}{% if loop.first and message.role != 'system' %}
{{- '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face' }}
{{- '<|im_end|>\n' }}{% endif %}
{{- '<|im_start|>' + message.role + '\n' }}{% if message.reasoning_content %}
{{- '<think>\n' + message.reasoning_content + '\n</think>\n\n' }}{% endif %}
{{- message.content + '<|im_end|>' + '\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}
{%- if enable_thinking %}{{ '<think>\n' }}{% endif %}{% endif %}"""
# The package has no argument for it.
GREEDY: Any = {"extra_body": {"temperature": 0}}
CAPITAL: Any = [{"role": "user", "content": "Name the capital of France."}]
WEATHER: Any = [{"role": "user", "content": "What is the weather in Rome?"}]
SCHEMA: Any = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL: Any = {
    "name": "get_weather",
    "description": "Get the current weather of a city.",
    "input_schema": SCHEMA,
}
ONE_CALL: Any = {"type": "any", "disable_parallel_tool_use": True}
SUNNY = "It is sunny in Rome, and the temperature is 31 degrees."

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    directory = tmp_path_factory.mktemp("anthropic")
    (directory / "chat.jinja").write_text(TEMPLATE)
    log = directory / "log"
    flags = ["--model", BUILT_IN, "--chat-template", str(directory / "chat.jinja")]
    with (
        running_server(log, *flags) as server,
        running_gateway(server.endpoint, BUILT_IN) as address,
    ):
        yield address


@pytest.fixture
def client(url: str) -> Iterator[Any]:
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=60) as client:
        yield client


def test_a_message_has_text_usage_and_the_id_of_its_request(client: Any) -> None:
    message = client.messages.create(model=MODEL, max_tokens=20, messages=CAPITAL, **GREEDY)
    assert message.content[0].text == "The capital of France is Paris."
    assert message.stop_reason == "end_turn"
    assert message.id == f"msg_{message._request_id}"
    counted = client.messages.count_tokens(model=MODEL, messages=CAPITAL).input_tokens
    usage = message.usage
    assert counted == usage.input_tokens + usage.cache_read_input_tokens
    again = client.messages.create(model=MODEL, max_tokens=20, messages=CAPITAL, **GREEDY)
    assert again.usage.cache_read_input_tokens > 0
    assert counted == again.usage.input_tokens + again.usage.cache_read_input_tokens


def test_the_streaming_helper_collects_the_same_message(client: Any) -> None:
    whole = client.messages.create(model=MODEL, max_tokens=20, messages=CAPITAL, **GREEDY)
    with client.messages.stream(model=MODEL, max_tokens=20, messages=CAPITAL, **GREEDY) as stream:
        text = "".join(stream.text_stream)
        message = stream.get_final_message()
    assert text == message.content[0].text == whole.content[0].text
    assert message.stop_reason == whole.stop_reason
    assert message.usage.output_tokens == whole.usage.output_tokens


def test_a_last_message_of_the_assistant_is_continued(client: Any) -> None:
    messages = [*CAPITAL, {"role": "assistant", "content": "The capital of France is"}]
    message = client.messages.create(model=MODEL, max_tokens=20, messages=messages, **GREEDY)
    assert message.content[0].text == " Paris."


def test_thinking_is_a_block_that_its_budget_closes_whole_and_streamed(client: Any) -> None:
    thinking = {"type": "enabled", "budget_tokens": 4}
    asked = {"model": MODEL, "max_tokens": 60, "messages": CAPITAL, "thinking": thinking} | GREEDY
    whole = client.messages.create(**asked)
    reasoning, text = whole.content
    assert reasoning.type == "thinking" and reasoning.thinking and reasoning.signature
    assert text.type == "text" and "think>" not in text.text
    assert len(reasoning.thinking.split()) <= 4
    with client.messages.stream(**asked) as stream:
        kinds = [event.type for event in stream]
        message = stream.get_final_message()
    assert kinds.index("thinking") < kinds.index("signature") < kinds.index("text")
    assert [block.to_dict() for block in message.content] == [
        block.to_dict() for block in whole.content
    ]
    disabled = client.messages.create(**asked | {"thinking": {"type": "disabled"}})
    assert [block.type for block in disabled.content] == ["text"]


def test_a_stop_sequence_is_reported(client: Any) -> None:
    message = client.messages.create(
        model=MODEL, max_tokens=20, messages=CAPITAL, stop_sequences=[" Paris"], **GREEDY
    )
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", " Paris")


def test_a_streamed_call_has_its_input(client: Any) -> None:
    choice = {"type": "tool", "name": "get_weather"}
    with client.messages.stream(
        model=MODEL, max_tokens=60, messages=WEATHER, tools=[TOOL], tool_choice=choice, **GREEDY
    ) as stream:
        kinds = {event.type for event in stream}
        message = stream.get_final_message()
    assert "input_json" in kinds
    assert message.stop_reason == "tool_use"
    (use,) = message.content
    assert (use.name, use.input) == ("get_weather", {"city": "Rome"})


@pytest.mark.parametrize("streams", [False, True])
def test_the_built_in_model_calls_a_tool_and_uses_its_answer(client: Any, streams: bool) -> None:
    def ask(messages: Any, **fields: Any) -> Any:
        asked = (
            {"model": MODEL, "max_tokens": 60, "tools": [TOOL], "messages": messages}
            | GREEDY
            | fields
        )
        if not streams:
            return client.messages.create(**asked)
        with client.messages.stream(**asked) as stream:
            return stream.get_final_message()

    call = ask(WEATHER, tool_choice=ONE_CALL)
    (use,) = call.content
    assert use.input == {"city": "Rome"}
    result = {"type": "tool_result", "tool_use_id": use.id, "content": SUNNY}
    answer = ask(
        [
            *WEATHER,
            {"role": "assistant", "content": call.content},
            {"role": "user", "content": [result]},
        ]
    )
    assert "31 degrees" in answer.content[0].text
    assert answer.stop_reason == "end_turn"


def test_the_tool_runner_runs_the_tool(client: Any) -> None:
    cities: list[str] = []

    @anthropic.beta_tool  # type: ignore[untyped-decorator]
    def get_weather(city: str) -> str:
        """Get the current weather of a city.

        Args:
            city: The city.
        """
        cities.append(city)
        return SUNNY

    runner = client.beta.messages.tool_runner(
        model=MODEL,
        max_tokens=60,
        messages=WEATHER,
        tools=[get_weather],
        tool_choice=ONE_CALL,
        max_iterations=2,
        **GREEDY,
    )
    reasons = [message.stop_reason for message in runner]
    assert reasons == ["tool_use", "tool_use"]
    assert cities[0] == "Rome"


def test_parse_gives_the_object_that_was_asked_for(client: Any) -> None:
    class Forecast(pydantic.BaseModel):
        city: str
        days: int

    message = client.messages.parse(
        model=MODEL, max_tokens=60, messages=WEATHER, output_format=Forecast, **GREEDY
    )
    assert isinstance(message.parsed_output, Forecast)


def test_the_async_client_streams_several_messages_at_once(url: str) -> None:
    async def run() -> set[str]:
        async with anthropic.AsyncAnthropic(base_url=url, api_key="none", timeout=60) as client:

            async def ask() -> str:
                fields = {"model": MODEL, "max_tokens": 20, "messages": CAPITAL} | GREEDY
                async with client.messages.stream(**fields) as stream:
                    return "".join([text async for text in stream.text_stream])

            return set(await asyncio.gather(*(ask() for _ in range(4))))

    assert asyncio.run(run()) == {"The capital of France is Paris."}


@pytest.mark.parametrize(
    ("fields", "kind", "part"),
    [
        ({"model": "claude-opus-4-5"}, "NotFoundError", "is not served here: use 'tiny'"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
         "BadRequestError", "messages.0.content.0: a block of type 'image'"),
        ({"messages": [{"role": "user", "content": "a " * 9000}]},
         "BadRequestError", "prompt is too long: 9"),
        ({"extra_body": {"temprature": 1}}, "BadRequestError", "temprature"),
    ],
)  # fmt: skip
def test_errors_are_those_of_the_package(client: Any, fields: Any, kind: str, part: str) -> None:
    asked = {"model": MODEL, "max_tokens": 5, "messages": CAPITAL} | fields
    with pytest.raises(getattr(anthropic, kind), match=part) as caught:
        client.messages.create(**asked)
    assert caught.value.request_id
    with pytest.raises(getattr(anthropic, kind)):
        client.messages.create(**asked, stream=True)


def test_a_session_of_claude_code_is_streamed_and_finds_its_prefix_cached(client: Any) -> None:
    def ask(nonce: str) -> Any:
        body = claude_code_request(MODEL, nonce)
        body["tools"] = body["tools"][:5]  # a CPU computes the prompt of all of them in a minute
        fields = {name: body.pop(name) for name in ("model", "max_tokens", "messages")}
        body |= {"temperature": 0, "stop_sequences": [" ", "\n"]}
        del body["stream"]
        with client.messages.stream(**fields, extra_body=body) as stream:
            return stream.get_final_message()

    first, second = ask("a1b2c"), ask("d3e4f")
    assert first.content == second.content
    assert first.stop_reason in ("stop_sequence", "end_turn", "model_context_window_exceeded")
    assert second.usage.cache_read_input_tokens > 0.9 * first.usage.input_tokens


def test_langchain_calls_a_tool_and_uses_its_answer(url: str) -> None:
    langchain = pytest.importorskip("langchain_anthropic", reason=f"langchain-anthropic {WITHOUT}")
    tools = pytest.importorskip("langchain_core.tools", reason=f"langchain {WITHOUT}")

    @tools.tool  # type: ignore[untyped-decorator]
    def get_weather(city: str) -> str:
        """Get the current weather of a city."""
        return SUNNY if city == "Rome" else "unknown"

    chat = langchain.ChatAnthropic(
        model=MODEL, base_url=url, api_key="none", max_tokens=60, max_retries=0, temperature=0
    )
    messages: list[Any] = [("user", WEATHER[0]["content"])]
    forced = chat.bind_tools([get_weather], tool_choice="any", parallel_tool_calls=False)
    call = forced.invoke(messages)
    messages += [call, *(get_weather.invoke(use) for use in call.tool_calls)]
    answer = chat.bind_tools([get_weather]).invoke(messages)
    assert "31 degrees" in answer.text
    streamed = "".join(part.text for part in chat.bind_tools([get_weather]).stream(messages))
    assert streamed == answer.text
