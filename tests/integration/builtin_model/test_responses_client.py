"""The unmodified `openai` package over /v1/responses, against the built-in model."""

from typing import Any, Literal

import openai
import pydantic
import pytest
from openai.types.responses import Response

from tests.gateway import MODEL
from tests.integration.builtin_model.weather import TOOL

CAPITAL: Any = {"model": MODEL, "input": "Name the capital of France.", "temperature": 0}
WEATHER: Any = {"role": "user", "content": "What is the weather in Rome?"}
NOTE: Any = {"type": "custom", "name": "note", "description": "Write a note."}
SUNNY = "It is sunny in Rome, and the temperature is 31 degrees."

pytestmark = pytest.mark.timeout(180)


class Place(pydantic.BaseModel):
    """A city."""

    city: Literal["Rome", "Oslo"]


def ask(client: openai.OpenAI, streams: bool, **fields: Any) -> Response:
    """Return a response, whole or as the streaming helper collects it."""
    asked = {"model": MODEL, "temperature": 0, "max_output_tokens": 60, **fields}
    if not streams:
        whole: Response = client.responses.create(**asked)
        return whole
    with client.responses.stream(**asked) as stream:
        final: Response = stream.get_final_response()
        return final


@pytest.mark.parametrize("streams", [False, True])
def test_a_response_has_text_and_usage(client: openai.OpenAI, streams: bool) -> None:
    answer = ask(client, streams, input="Name the capital of France.")
    assert answer.output_text == "The capital of France is Paris."
    assert answer.status == "completed" and answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens
    chat = client.chat.completions.create(
        model=MODEL, temperature=0, messages=[{"role": "user", "content": CAPITAL["input"]}]
    )
    assert chat.usage is not None
    assert chat.usage.prompt_tokens == answer.usage.input_tokens
    assert chat.usage.completion_tokens == answer.usage.output_tokens


def test_an_answer_at_the_limit_is_incomplete(client: openai.OpenAI) -> None:
    answer = client.responses.create(**CAPITAL, max_output_tokens=3)
    assert answer.status == "incomplete" and answer.usage is not None
    assert answer.usage.output_tokens == 3


def test_logprobs_are_those_of_the_text(client: openai.OpenAI) -> None:
    answer = client.responses.create(
        **CAPITAL, top_logprobs=2, include=["message.output_text.logprobs"]
    )
    message: Any = answer.output[0]
    tokens = message.content[0].logprobs
    assert "".join(token.token for token in tokens) == answer.output_text
    assert all(len(token.top_logprobs) == 2 for token in tokens)


def test_parse_returns_the_object_that_was_asked_for(client: openai.OpenAI) -> None:
    answer = client.responses.parse(
        model=MODEL, input="Rome is a city.", text_format=Place, temperature=0
    )
    assert answer.output_parsed == Place(city="Rome")


@pytest.mark.parametrize("streams", [False, True])
def test_the_built_in_model_calls_a_tool_and_uses_its_answer(
    client: openai.OpenAI, streams: bool
) -> None:
    choice: Any = {"type": "function", "name": "get_weather"}
    answer = ask(client, streams, input=[WEATHER], tools=[TOOL], tool_choice=choice)
    (call,) = answer.output
    assert call.type == "function_call" and call.arguments == '{"city": "Rome"}'
    output = {"type": "function_call_output", "call_id": call.call_id, "output": SUNNY}
    items: Any = [WEATHER, call.to_dict(), output]
    answer = ask(client, streams, input=items, tools=[TOOL])
    assert answer.status == "completed" and "31 degrees" in answer.output_text


@pytest.mark.parametrize("streams", [False, True])
def test_the_built_in_model_calls_a_custom_tool_with_a_text(
    client: openai.OpenAI, streams: bool
) -> None:
    choice: Any = {"type": "custom", "name": "note"}
    answer = ask(client, streams, input="Note: buy milk.", tools=[TOOL, NOTE], tool_choice=choice)
    (call,) = answer.output
    assert call.type == "custom_tool_call" and call.name == "note"
    assert call.input and not call.input.startswith("{")


def test_an_answer_with_tools_and_a_format_is_calls_or_the_format(client: openai.OpenAI) -> None:
    answer = client.responses.parse(
        model=MODEL, input="Rome is a city.", text_format=Place, tools=[TOOL], temperature=0
    )
    if answer.output[0].type == "function_call":
        assert answer.output[0].name == "get_weather"
    else:
        assert answer.output_parsed is not None


def test_a_prompt_over_the_context_is_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="maximum context length") as raised:
        client.responses.create(model=MODEL, input="word " * 9000, truncation="disabled")
    assert raised.value.code == "context_length_exceeded" and raised.value.param == "input"
