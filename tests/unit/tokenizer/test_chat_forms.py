"""Chats reach a template in the form that it takes; an answer may continue the last message."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from quadriga.errors import InvalidRequest
from quadriga.server.answer_format import KNOWN_FORMATS
from quadriga.wire.client import ChatMessage, ChatOptions
from tests.unit.tokenizer.real_templates import DIRECTORY, TOKENS
from tokenizer_proc.preparation.chat import SHOWS_NO_CALLS, ChatTemplate
from tokenizer_proc.preparation.templates.adapt import short_id
from tokenizer_proc.preparation.templates.derive import ParserNames

PLAIN = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}" + PLAIN
ALTERNATING = (
    "{% for m in messages %}{% if loop.index0 and m.role == messages[loop.index0 - 1].role %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{% endfor %}" + PLAIN
)
WITH_CALLS = (
    "{{ tools | tojson if tools }}" + "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}[{{ c.id }}]<tool_call>"
    '{"name": "{{ c.function.name }}", "arguments": CALL}</tool_call>{% endfor %}'
    "</{{ m.role }}>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
AS_OBJECT = WITH_CALLS.replace("CALL", "{{ c.function.arguments | tojson }}")
AS_TEXT = WITH_CALLS.replace("CALL", "{{ c.function.arguments + '' }}")
SHORT_IDS = AS_OBJECT.replace(
    "[{{ c.id }}]", "{% if c.id | length != 9 %}{{ raise_exception('id') }}{% endif %}[{{ c.id }}]"
)

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"enum": [3, 5]}},
            "required": ["city", "days"],
        },
    },
}
CALL = {"id": "call-1", "function": {"name": "weather", "arguments": {"city": "Köln"}}}
DESCRIBED = '{"name": "weather", "description": "Weather.", "parameters": '
EXAMPLE = '<tool_call>\n{"name": "weather", "arguments": {"city": "text", "days": 3}}\n</tool_call>'


def chat_template(directory: Path, source: str, parsers: ParserNames | None = None) -> ChatTemplate:
    (directory / "chat.jinja").write_text(source)
    return ChatTemplate(directory, directory / "chat.jinja", None, parsers)


def render(directory: Path, source: str, *messages: ChatMessage, **options: Any) -> str:
    return chat_template(directory, source).render(list(messages), ChatOptions(**options))


USER = ChatMessage("user", "Hi")
SYSTEM = ChatMessage("system", "Be brief.")
CALLING = ChatMessage("assistant", "Wait.", tool_calls=[CALL])
RESULT = ChatMessage("tool", "sunny", name="weather", tool_call_id="call-1")


# --- templates without tools ----------------------------------------------------------------------


def test_tools_are_described_in_a_system_message(tmp_path: Path) -> None:
    text = render(tmp_path, PLAIN, USER, tools=[TOOL])
    assert text.startswith("<system>You can call functions.")
    assert DESCRIBED in text
    assert text.endswith(f"{EXAMPLE}</system><user>Hi</user><assistant>")


def test_a_system_message_of_the_chat_precedes_the_description(tmp_path: Path) -> None:
    text = render(tmp_path, PLAIN, SYSTEM, USER, tools=[TOOL])
    assert text.startswith("<system>Be brief.\n\nYou can call functions.")
    assert text.count("<system>") == 1


def test_without_a_system_role_the_description_precedes_the_first_question(tmp_path: Path) -> None:
    text = render(tmp_path, NO_SYSTEM, USER, tools=[TOOL])
    assert text.startswith("<user>You can call functions.")
    assert text.endswith(f"{EXAMPLE}\n\nHi</user><assistant>")


def test_calls_and_answers_of_tools_are_text(tmp_path: Path) -> None:
    text = render(tmp_path, PLAIN, USER, CALLING, RESULT, RESULT, USER)
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
    result = "<tool_response>\nsunny\n</tool_response>"
    assert text == (
        f"<user>Hi</user><assistant>Wait.\n{call}</assistant><user>{result}\n{result}</user>"
        "<user>Hi</user><assistant>"
    )


def test_turns_of_one_role_are_joined_where_roles_must_alternate(tmp_path: Path) -> None:
    text = render(tmp_path, ALTERNATING, USER, CALLING, RESULT, USER)
    assert text.endswith("sunny\n</tool_response>\n\nHi</user><assistant>")


def test_results_of_a_template_that_takes_them_stay_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(TOKENS))
    chat = ChatTemplate(tmp_path, DIRECTORY / "mistral-small-3.2.jinja")
    calling = ChatMessage("assistant", "", tool_calls=[CALL, CALL])
    options = ChatOptions(tools=[TOOL])
    text = chat.render([USER, calling, RESULT, RESULT], options)
    result = f"[TOOL_RESULTS]{short_id('call-1')}[TOOL_CONTENT]sunny[/TOOL_RESULTS]"
    assert text.endswith(result + result)


def test_a_model_without_tools_answers_in_the_form_that_is_described(tmp_path: Path) -> None:
    found = chat_template(tmp_path, PLAIN).answer_format
    assert (found.calls, found.takes_tools) == (KNOWN_FORMATS["hermes"].calls, False)
    chosen = chat_template(tmp_path, PLAIN, ParserNames("glm45", "none"))
    text = chosen.render([USER], ChatOptions(tools=[TOOL]))
    assert "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>text</arg_value>" in text
    assert chosen.answer_format.calls == KNOWN_FORMATS["glm45"].calls


@pytest.mark.parametrize(
    "function",
    [
        {"name": "f"},
        {"name": "f", "parameters": {}},
        {"name": "f", "parameters": {"properties": {"a": True, "b": {"type": []}}}},
        {"name": "f", "parameters": {"properties": 1, "required": [1, "a"]}},
        {"name": "f", "parameters": {"properties": {"a": {"type": ["integer", "null"]}}}},
        {},
    ],
    ids=str,
)
def test_every_schema_is_described(tmp_path: Path, function: dict[str, Any]) -> None:
    text = render(tmp_path, PLAIN, USER, tools=[{"type": "function", "function": function}])
    assert text.endswith("</tool_call></system><user>Hi</user><assistant>")


# --- templates with tools -------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [{"city": "Köln"}, '{"city": "Köln"}'])
@pytest.mark.parametrize("source", [AS_OBJECT, AS_TEXT], ids=["object", "text"])
def test_arguments_have_the_form_that_the_template_takes(
    tmp_path: Path, source: str, arguments: object
) -> None:
    call = {"id": "1", "function": {"name": "weather", "arguments": arguments}}
    text = render(tmp_path, source, USER, ChatMessage("assistant", "", tool_calls=[call]))
    assert '{"name": "weather", "arguments": {"city": "Köln"}}' in text


def test_ids_are_short_where_the_template_takes_no_others(tmp_path: Path) -> None:
    assert "[call-1]" in render(tmp_path, AS_OBJECT, USER, CALLING, RESULT)
    text = render(tmp_path, SHORT_IDS, USER, CALLING, RESULT)
    assert f"[{short_id('call-1')}]" in text
    assert short_id("abcDEF123") == "abcDEF123"
    assert len(short_id("call_0123456789")) == 9 and short_id("a") != short_id("b")


def test_reasoning_reaches_the_template(tmp_path: Path) -> None:
    turn = ChatMessage("assistant", "Hi", reasoning_content="A greeting.")
    for name in ("reasoning_content", "reasoning", "thinking"):
        assert render(tmp_path, f"{{{{ messages[0].{name} }}}}", turn) == "A greeting."


def test_a_switch_turns_the_reasoning_off() -> None:
    chat = ChatTemplate(DIRECTORY, DIRECTORY / "qwen3.jinja")
    reasoning = chat.answer_format.reasoning
    assert reasoning is not None
    off = chat.render([USER], ChatOptions(template_args={reasoning.switch: False}))
    assert off.endswith(f"{reasoning.open}\n\n{reasoning.close}\n\n")
    assert reasoning.open not in chat.render([USER], ChatOptions())


@pytest.mark.parametrize("in_a_file", [True, False])
def test_a_template_for_tools_renders_chats_with_tools(tmp_path: Path, in_a_file: bool) -> None:
    entries = [{"name": "default", "template": PLAIN}]
    if in_a_file:
        folder = tmp_path / "additional_chat_templates"
        folder.mkdir()
        (folder / "tool_use.jinja").write_text(AS_OBJECT)
    else:
        entries.append({"name": "tool_use", "template": AS_OBJECT})
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": entries}))
    chat = ChatTemplate(tmp_path)
    assert chat.answer_format.takes_tools
    assert chat.render([USER], ChatOptions()) == "<user>Hi</user><assistant>"
    text = chat.render([USER, CALLING, RESULT], ChatOptions(tools=[TOOL]))
    assert text.startswith(json.dumps([TOOL]))
    assert '[call-1]<tool_call>{"name": "weather", "arguments": {"city": "Köln"}}' in text


# --- flags ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", ["qwen3", "smollm3", "mistral-nemo"])
def test_flags_overrule_the_template(file: str) -> None:
    chosen = ChatTemplate(
        DIRECTORY, DIRECTORY / f"{file}.jinja", None, ParserNames("granite", "mistral")
    )
    found = chosen.answer_format
    assert found.source == "granite"
    assert found.calls == KNOWN_FORMATS["granite"].calls
    assert found.reasoning is not None and found.reasoning.open == "[THINK]"
    none = ChatTemplate(DIRECTORY, DIRECTORY / f"{file}.jinja", None, ParserNames("none", "none"))
    assert (none.answer_format.calls, none.answer_format.reasoning) == (None, None)


def test_a_flag_answers_for_a_template_that_shows_no_calls(tmp_path: Path) -> None:
    source = "{{ tools }}" + PLAIN
    assert chat_template(tmp_path, source).notes == (SHOWS_NO_CALLS,)
    assert chat_template(tmp_path, source, ParserNames(tool_call="hermes")).notes == ()
    assert chat_template(tmp_path, PLAIN).notes == ()


# --- continue_final_message -----------------------------------------------------------------------

CONTINUES: dict[str, Any] = {"continue_final_message": True, "add_generation_prompt": False}


@pytest.mark.parametrize("content", ["Once", "Once ", "Once\n\n", ""])
@pytest.mark.parametrize("name", ["qwen2.5", "qwen3", "phi-3.5-mini", "gemma-4", "mistral-nemo"])
def test_the_last_message_is_continued_as_with_transformers(name: str, content: str) -> None:
    render_jinja = pytest.importorskip(
        "transformers.utils.chat_template_utils"
    ).render_jinja_template
    file = DIRECTORY / f"{name}.jinja"
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": content}]
    expected = render_jinja(
        [turns], chat_template=file.read_text(), continue_final_message=True, **TOKENS
    )[0][0]
    chat = ChatTemplate(DIRECTORY, file)
    messages = [ChatMessage(turn["role"], turn["content"]) for turn in turns]
    options = ChatOptions(**CONTINUES, template_args=dict(TOKENS))
    assert chat.render(messages, options) == expected


@pytest.mark.parametrize(
    ("options", "last", "reason"),
    [
        ({"continue_final_message": True}, "assistant", "are both true"),
        (CONTINUES, "user", "the role of the last message is 'user'"),
    ],
)
def test_what_cannot_be_continued_is_refused(
    tmp_path: Path, options: dict[str, Any], last: str, reason: str
) -> None:
    with pytest.raises(InvalidRequest, match=reason) as caught:
        render(tmp_path, PLAIN, USER, ChatMessage(last, "x"), **options)
    assert caught.value.field == "continue_final_message"
    with pytest.raises(InvalidRequest, match="does not write the last message"):
        render(tmp_path, "{{ 1 }}", USER, ChatMessage("assistant", "x"), **CONTINUES)


def test_a_prompt_may_end_without_the_begin_of_an_answer(tmp_path: Path) -> None:
    assert render(tmp_path, PLAIN, USER, add_generation_prompt=False) == "<user>Hi</user>"


def test_the_docs_name_every_known_format() -> None:
    docs = (DIRECTORY.parents[2] / "docs" / "tools.md").read_text()
    assert all(f"| `{name}` |" in docs for name in KNOWN_FORMATS)


def test_a_developers_message_is_the_systems_where_the_template_has_no_form_for_it(
    tmp_path: Path,
) -> None:
    chat = [ChatMessage("developer", "Be brief."), ChatMessage("user", "Hi")]
    echoed = chat_template(tmp_path, PLAIN).render(chat, ChatOptions())
    assert echoed == "<system>Be brief.</system><user>Hi</user><assistant>"
    own = "{% if messages[0].role == 'developer' %}DEV: {% endif %}" + PLAIN
    rendered = chat_template(tmp_path, own).render(chat, ChatOptions())
    assert rendered.startswith("DEV: <developer>Be brief.")


@pytest.mark.parametrize("name", ["auto", "glm45"])
def test_the_flag_says_whether_calls_need_the_marks_of_their_form(
    tmp_path: Path, name: str
) -> None:
    loose = chat_template(tmp_path, PLAIN, ParserNames.of_flags(name, "auto")).answer_format
    exact = chat_template(tmp_path, PLAIN, ParserNames.of_flags(f"{name}:exact", "auto"))
    assert loose.takes_unmarked
    assert exact.answer_format == msgspec.structs.replace(loose, takes_unmarked=False)
