"""The built-in model calls tools and uses their answers, by unmodified clients of OpenAI's API."""

import json
from typing import Any

import openai
import pydantic
import pytest

from tests.gateway import MODEL

WITHOUT = "comes with pip install -e '.[clients]'"
SUNNY = "It is sunny in Rome, and the temperature is 31 degrees."
QUESTION = "What is the weather in Rome?"
FORCED: Any = {"type": "function", "function": {"name": "get_weather"}}

pytestmark = pytest.mark.timeout(180)


class GetWeather(pydantic.BaseModel):
    """Get the current weather of a city."""

    city: str


TOOL: Any = openai.pydantic_function_tool(GetWeather, name="get_weather")
LAX_TOOL: Any = {"type": "function", "function": {
    key: value for key, value in TOOL["function"].items() if key != "strict"}}  # fmt: skip
ASK: Any = {
    "model": MODEL,
    "messages": [{"role": "user", "content": QUESTION}],
    "temperature": 0,
    "max_tokens": 60,
}


def get_weather(city: str) -> str:
    """Get the current weather of a city."""
    assert city == "Rome"
    return SUNNY


def answer_with(call: Any) -> dict[str, Any]:
    """Call the tool and return its message."""
    result = get_weather(**json.loads(call.function.arguments))
    return {"role": "tool", "tool_call_id": call.id, "content": result}


@pytest.mark.parametrize("choice", ["required", FORCED])
@pytest.mark.parametrize("tool", [TOOL, LAX_TOOL])
def test_the_built_in_model_calls_a_tool_and_uses_its_answer(
    client: openai.OpenAI, choice: Any, tool: Any
) -> None:
    asked = client.chat.completions.create(**ASK, tools=[tool], tool_choice=choice).choices[0]
    assert asked.finish_reason == "tool_calls" and asked.message.content is None
    (call,) = asked.message.tool_calls or []
    assert call.type == "function" and call.function.name == "get_weather"
    messages: Any = [*ASK["messages"], asked.message, answer_with(call)]
    answer = client.chat.completions.create(**{**ASK, "messages": messages}, tools=[LAX_TOOL])
    assert "31 degrees" in (answer.choices[0].message.content or "")
    assert answer.choices[0].finish_reason == "stop"


def test_a_streamed_call_is_that_of_the_whole_answer(client: openai.OpenAI) -> None:
    fields: Any = {**ASK, "tools": [TOOL], "tool_choice": "required"}
    pieces = [
        call
        for part in client.chat.completions.create(**fields, stream=True)
        for call in part.choices[0].delta.tool_calls or []
    ]
    assert [piece.function.name for piece in pieces if piece.id] == ["get_weather"]
    assert {piece.index for piece in pieces} == {0}
    assert len(pieces) > 2, "the arguments come piece by piece"
    arguments = "".join(piece.function.arguments or "" for piece in pieces)
    assert GetWeather.model_validate_json(arguments).city == "Rome"


def test_openais_helpers_parse_the_call_and_the_answer(client: openai.OpenAI) -> None:
    fields: Any = {**ASK, "tools": [TOOL], "tool_choice": "required"}
    parsed = client.chat.completions.parse(**fields).choices[0].message
    assert parsed.tool_calls
    assert parsed.tool_calls[0].function.parsed_arguments == GetWeather(city="Rome")
    with client.chat.completions.stream(**fields) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion().choices[0].message
    assert "tool_calls.function.arguments.done" in kinds
    assert final.tool_calls
    assert final.tool_calls[0].function.parsed_arguments == GetWeather(city="Rome")
    answer = client.chat.completions.parse(**ASK, response_format=GetWeather)
    assert isinstance(answer.choices[0].message.parsed, GetWeather)


def test_the_prompt_of_a_chat_with_tools_is_rendered(client: openai.OpenAI) -> None:
    body = {"messages": ASK["messages"], "tools": [TOOL]}
    base = str(client.base_url).removesuffix("v1/")
    rendered: Any = client.with_options(base_url=base).post("/render", cast_to=object, body=body)
    assert QUESTION in rendered["prompt"] and '"get_weather"' in rendered["prompt"]
    assert rendered["count"] == len(rendered["tokens"])
    counted = client.chat.completions.create(**{**ASK, "max_tokens": 1}, tools=[TOOL]).usage
    assert counted is not None and counted.prompt_tokens == rendered["count"]


def test_langchain_runs_a_loop_of_calls_and_answers(url: str) -> None:
    langchain = pytest.importorskip("langchain_openai", reason=f"langchain-openai {WITHOUT}")
    tools = pytest.importorskip("langchain_core.tools", reason=f"langchain {WITHOUT}")
    chat = langchain.ChatOpenAI(
        model=MODEL, base_url=url, api_key="none", max_retries=0, max_tokens=60, temperature=0
    )
    function = tools.tool(get_weather)
    messages: list[Any] = [("user", QUESTION)]
    calling = chat.bind_tools([function], tool_choice="any")
    messages.append(calling.invoke(messages))
    (call,) = messages[-1].tool_calls
    messages.append(function.invoke(call))
    assert SUNNY in messages[-1].content
    assert "31 degrees" in chat.bind_tools([function]).invoke(messages).content
    gathered: Any = None
    for part in calling.stream(messages[:1]):
        gathered = part if gathered is None else gathered + part
    assert gathered.tool_calls[0]["args"] == call["args"] == {"city": "Rome"}


def test_litellm_calls_a_tool_and_uses_its_answer(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    litellm: Any = pytest.importorskip("litellm", reason=f"litellm {WITHOUT}")
    fields = ASK | {"model": f"openai/{MODEL}", "api_base": url, "api_key": "none",
                    "num_retries": 0, "timeout": 60, "tools": [LAX_TOOL]}  # fmt: skip
    asked = litellm.completion(**fields, tool_choice="required").choices[0].message
    (call,) = asked.tool_calls
    messages = [*ASK["messages"], asked.model_dump(), answer_with(call)]
    answer = litellm.completion(**fields | {"messages": messages})
    assert "31 degrees" in answer.choices[0].message.content
    parts = litellm.completion(**fields, tool_choice="required", stream=True)
    whole = litellm.stream_chunk_builder(list(parts))
    streamed = whole.choices[0].message.tool_calls[0].function
    assert (streamed.name, json.loads(streamed.arguments)) == ("get_weather", {"city": "Rome"})
