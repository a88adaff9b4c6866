"""Chats and tools become prompts, by the model's own template."""

import json
from pathlib import Path

import pytest

from quadriga.errors import InvalidRequest
from quadriga.messages.public import ChatMessage, ChatOptions
from tokenizer_proc.chat import ChatTemplate

WITH_TOOLS = (
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}[{{ m.role }}{% if m.name %} {{ m.name }}{% endif %}]{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function.arguments.city }}{% endfor %}"
    "{% endfor %}{{ mood }}{% if add_generation_prompt %}>{% endif %}"
)


def template(directory: Path, source: str | None) -> ChatTemplate:
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": source}))
    return ChatTemplate(directory)


def test_tools_calls_answers_and_template_arguments_reach_the_template(tmp_path: Path) -> None:
    call = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}
    messages = [
        ChatMessage("user", "Hi"),
        ChatMessage("assistant", "", tool_calls=[call]),
        ChatMessage("tool", "sunny", name="weather", tool_call_id="1"),
    ]
    options = ChatOptions(tools=[{"name": "weather"}], template_args={"mood": "!"})
    rendered = template(tmp_path, WITH_TOOLS).render(messages, options)
    assert rendered == (
        '[{"name": "weather"}][user]Hi[assistant]<tool_call>Rome[tool weather]sunny!>'
    )


def test_template_arguments_may_replace_no_messages(tmp_path: Path) -> None:
    options = ChatOptions(template_args={"messages": [], "add_generation_prompt": False})
    assert template(tmp_path, WITH_TOOLS).render([ChatMessage("user", "Hi")], options) == "[user]Hi"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (WITH_TOOLS, "hermes"),
        ("{{ tools }} [TOOL_CALLS]", "mistral"),
        ('{{ tools }} {"name": n, "parameters": p}', "llama3"),
        ("{{ tools }}", "hermes"),
        ("{{ messages }}", ""),
        (None, ""),
    ],
)
def test_the_template_tells_how_the_model_writes_tool_calls(
    tmp_path: Path, source: str | None, expected: str
) -> None:
    assert template(tmp_path, source).tool_format == expected


def test_tools_for_a_template_that_takes_none_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="takes none") as caught:
        template(tmp_path, "{{ messages }}").render([], ChatOptions(tools=[{}]))
    assert caught.value.field == "tools"


def test_a_template_that_breaks_on_what_it_is_given_is_the_clients_error(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="chat template refused"):
        template(tmp_path, "{{ messages[0].content + 1 }}").render(
            [ChatMessage("user", "x")], ChatOptions()
        )
