"""A tokenizer's response_template gives the marks of answers."""

import json
from pathlib import Path
from typing import Any

import pytest

from quadriga.server.answer_format import KNOWN_FORMATS, CallFormat, CallStyle, ReasoningFormat
from tokenizer_proc.preparation.chat import ChatTemplate
from tokenizer_proc.preparation.templates.derive import GIVEN, ResponseMarks, read_response_template

TRANSFORM = {
    "type": "function",
    "function": {"name": "{content.name}", "arguments": "{content.arguments}"},
}
NAMED = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
THINKING = {"open": "<think>\n", "close": "\n</think>", "content": "text"}

TOOL_CALLS: dict[str, tuple[dict[str, Any], CallFormat | None]] = {
    "JSON objects": (
        {"open": "<tool_call>", "close": "</tool_call>", "content": "json", "repeats": True,
         "transform": TRANSFORM},
        CallFormat(style=CallStyle.JSON, open="<tool_call>", close="</tool_call>"),
    ),
    "a list with keys of its own": (
        {"open": "<|START_ACTION|>", "close": "<|END_ACTION|>", "content": "json",
         "transform_each": True,
         "transform": {"function": {"name": "{tool_name}", "arguments": "{parameters}"}}},
        CallFormat(style=CallStyle.JSON, open="<|START_ACTION|>", close="<|END_ACTION|>",
                   is_list=True, name_key="tool_name", arguments_key="parameters"),
    ),
    "a name before JSON": (
        {"open_pattern": r"\[TOOL_CALLS\](?P<name>[\w.-]+)\[ARGS\]", "close": "</s>",
         "content": "json", "transform": NAMED},
        CallFormat(style=CallStyle.NAMED_JSON, open="[TOOL_CALLS]", name_close="[ARGS]",
                   close="</s>"),
    ),
    "strings between marks": (
        {"open_pattern": r"<\|tool_call>call:(?P<name>\w+)", "close": "<tool_call|>",
         "content": "json", "transform": NAMED,
         "content_args": {"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]}},
        CallFormat(style=CallStyle.QUOTED, open="<|tool_call>call:", close="<tool_call|>",
                   quote='<|"|>'),
    ),
    "tags": (
        {"open_pattern": r"<tool_call>\s*<function=(?P<name>[^>]+)>\n",
         "close_pattern": r"</function>\s*</tool_call>", "content": "xml-inline",
         "transform": NAMED,
         "content_args": {
             "tag_pattern": r"<parameter=(?P<key>[^>]+)>\n(?P<value>.*?)\n</parameter>"}},
        CallFormat(style=CallStyle.TAGGED, open="<tool_call><function=", name_close=">\n",
                   close="</function></tool_call>", key_open="<parameter=", key_close=">\n",
                   value_close="\n</parameter>"),
    ),
    "an expression that is no text": (
        {"open_pattern": "(a|b)(?P<name>.)", "close": "c", "content": "json", "transform": NAMED},
        None,
    ),
    "lines": ({"open": "<call>", "close": "</call>", "content": "kv-lines"}, None),
}  # fmt: skip


@pytest.mark.parametrize(("field", "expected"), TOOL_CALLS.values(), ids=TOOL_CALLS.keys())
def test_calls_are_read(field: dict[str, Any], expected: CallFormat | None) -> None:
    config = {"response_template": {"start_anchor": "x", "fields": {"tool_calls": field}}}
    assert read_response_template(config) == ResponseMarks(expected)
    load = pytest.importorskip(
        "transformers.utils.chat_parsing.response_templates"
    ).load_response_template
    load(config["response_template"])  # the test's template is one for transformers


@pytest.mark.parametrize("name", ["reasoning_content", "thinking"])
def test_reasoning_is_read(name: str) -> None:
    config = {"response_template": {"fields": {name: THINKING}}}
    assert read_response_template(config) == ResponseMarks(None, ReasoningFormat())


@pytest.mark.parametrize("template", [None, [], {}, {"fields": 1}, {"fields": {"tool_calls": 1}}])
def test_what_is_no_response_template_gives_no_marks(template: object) -> None:
    assert read_response_template({"response_template": template}) == ResponseMarks()


@pytest.mark.parametrize("what", ["tags", "JSON objects", "a name before JSON"])
def test_its_marks_are_preferred_to_those_of_the_chat_template(tmp_path: Path, what: str) -> None:
    field, calls = TOOL_CALLS[what]
    config = {
        "chat_template": "{{ tools }}[TOOL_CALLS]",
        "response_template": {"fields": {"tool_calls": field, "thinking": THINKING}},
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    found = ChatTemplate(tmp_path).answer_format
    known = {"tags": "qwen3_coder", "JSON objects": "hermes"}.get(what)
    assert found.source == (known or GIVEN)
    assert found.calls == (KNOWN_FORMATS[known].calls if known else calls)
    assert found.reasoning == ReasoningFormat()
