"""Stored responses and conversations of the built-in model, by the unmodified `openai` package."""

from typing import Any

import openai
import pytest

from tests.gateway import MODEL
from tests.integration.builtin_model.weather import TOOL

pytestmark = pytest.mark.timeout(180)


def test_a_tool_is_called_and_answered_through_the_chain(client: Any) -> None:
    ask = {"model": MODEL, "temperature": 0, "max_output_tokens": 60, "tools": [TOOL]}
    first = client.responses.create(
        **ask, input="What is the weather in Rome?",
        tool_choice={"type": "function", "name": "get_weather"},
    )  # fmt: skip
    (call,) = first.output
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "Sunny, 31 C."}
    second = client.responses.create(**ask, input=[output], previous_response_id=first.id)
    assert second.status == "completed" and second.output_text
    kinds = [item.type for item in client.responses.input_items.list(second.id, order="asc")]
    assert kinds == ["message", "function_call", "function_call_output"]
    # The chain is the same prompt as the whole conversation.
    user = {"role": "user", "content": "What is the weather in Rome?"}
    whole = client.responses.create(**ask, input=[user, call.to_dict(), output], store=False)
    assert whole.output_text == second.output_text
    assert whole.usage.input_tokens == second.usage.input_tokens


def test_a_conversation_goes_on(client: Any) -> None:
    talk = client.conversations.create(metadata={"topic": "geography"})
    ask = {"model": MODEL, "temperature": 0, "conversation": talk.id, "max_output_tokens": 40}
    client.responses.create(**ask, input="Name the capital of France.")
    client.responses.create(**ask, input="And of Italy?")
    texts = [item.content[0].text for item in client.conversations.items.list(talk.id, order="asc")]
    assert texts[::2] == ["Name the capital of France.", "And of Italy?"]
    assert len(texts) == 4 and "Paris" in texts[1]
    client.conversations.delete(talk.id)
    with pytest.raises(openai.NotFoundError, match="was deleted"):
        client.conversations.retrieve(talk.id)
