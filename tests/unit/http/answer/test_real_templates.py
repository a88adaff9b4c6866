"""Calls that the templates of real models write are read again with the marks found in them."""

import json
from itertools import takewhile
from pathlib import Path

import pytest

from http_proc.answer.parser import ToolSchemas, make_parser, parse_answer
from quadriga.wire.client import ChatMessage, ChatOptions
from tokenizer_proc.preparation.chat import ChatTemplate, TokenMarks

DIRECTORY = Path(__file__).parents[3] / "fixtures" / "chat_templates"
# The template of Granite 3.3 takes tools and writes no calls.
FILES = [file for file in sorted(DIRECTORY.glob("*.jinja")) if file.stem != "granite-3.3"]
ENDS = ("</s>", "<|im_end|>", "<|end_of_text|>", "<|return|>", "<｜end▁of▁sentence｜>", "[e~[")
PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "description": "A city."},
        "days": {"type": "integer", "description": "Days from now."},
        "code": {"type": "string", "description": "A program."},
        "tags": {"type": "array", "items": {"type": "object"}, "description": "Tags."},
    },
}
ARGUMENTS = {
    "city": 'Zürich, "CH" 🚀',
    "days": 3,
    "code": "\ndef f(x):\n\treturn <b> < x\n",
    "tags": [{"a": [True, 0.5]}],
}
TOOL = {
    "type": "function",
    "function": {"name": "weather", "description": "The weather.", "parameters": PARAMETERS},
}
CALL = {
    "id": "abcDEF123",
    "type": "function",
    "function": {"name": "weather", "arguments": ARGUMENTS},
}
HELLO = ChatMessage(role="user", content="Hi")
CALLING = ChatMessage(role="assistant", content="", tool_calls=[CALL])
RESULT = ChatMessage(role="tool", content="17 °C", name="weather", tool_call_id="abcDEF123")


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_call_that_a_template_writes_is_read_with_its_marks(file: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "<s>", "eos_token": "</s>"}')
    template = ChatTemplate(tmp_path, file, TokenMarks(ENDS))
    answer = written_turn(template)
    tools = ToolSchemas(weather=PARAMETERS)
    (call,) = parse_answer(make_parser(template.answer_format, tools=tools), answer).calls
    assert (call.name, json.loads(call.arguments)) == ("weather", ARGUMENTS)
    assert call.is_complete


def written_turn(template: ChatTemplate) -> str:
    """Return the assistant's turn and what follows, from the begin of the mark of its call."""
    options = ChatOptions(tools=[TOOL])
    prompt = template.render([HELLO], options)
    chat = template.render([HELLO, CALLING, RESULT], options)
    same = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(prompt, chat, strict=False))))
    begin = max(chat.rfind(mark, 0, same) + 1 for mark in "\n>]")
    return chat[begin:].removeprefix("assistant")
