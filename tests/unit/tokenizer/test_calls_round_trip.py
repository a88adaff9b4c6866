"""Calls that a template or this server writes are read back by the gateway's parser."""

import json
from pathlib import Path
from typing import Any

import pytest

from http_proc.answer.parser import ToolSchemas, make_parser, parse_answer
from quadriga.server.answer_format import KNOWN_FORMATS, AnswerFormat, CallStyle
from tests.unit.tokenizer.real_templates import ENDS, FILES, TOKENS, WITHOUT_TOOLS
from tokenizer_proc.preparation.chat import ChatTemplate, TokenMarks
from tokenizer_proc.preparation.templates.adapt import write_calls
from tokenizer_proc.preparation.templates.probes import NAMES, Prober, render_calls

ARGUMENTS: list[dict[str, Any]] = [
    {"text": "Köln", "count": 2},
    {"text": "two\nlines, {braces} and 'quotes'", "flag": True},
    {"text": "7", "list": [1, "a"], "map": {"k": "v"}},
    {},
]
SCHEMA = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "count": {"type": "integer"},
        "flag": {"type": "boolean"},
        "list": {"type": "array"},
        "map": {"type": "object"},
    },
}
TOOLS = ToolSchemas(dict.fromkeys(NAMES, SCHEMA))


def parsed(text: str, answer_format: AnswerFormat) -> list[tuple[str, dict[str, Any]]]:
    """Return names and arguments of the calls in an answer, which has no other text."""
    answer = parse_answer(make_parser(answer_format, tools=TOOLS), text)
    assert answer.text.strip() == ""
    assert all(call.is_complete for call in answer.calls)
    return [(call.name, json.loads(call.arguments)) for call in answer.calls]


@pytest.mark.parametrize("arguments", ARGUMENTS, ids=str)
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_what_a_template_writes_is_read(
    tmp_path: Path, file: Path, arguments: dict[str, Any]
) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(TOKENS))
    chat = ChatTemplate(tmp_path, file, TokenMarks(ENDS))
    found = chat.answer_format
    given: Any = json.dumps(arguments) if chat._needs.arguments_are_text else arguments
    if not chat._needs.takes_calls:
        assert file.stem in (*WITHOUT_TOOLS, "granite-3.3")
        return
    for num_calls in (1, 2):
        text = render_calls(Prober(chat._render), given, ENDS, num_calls)
        if text is None:
            assert num_calls == 2  # some templates write one call a turn
            continue
        if found.calls is not None and found.calls.style is CallStyle.HARMONY:
            text = (
                "<|channel|>commentary "
                + text.removeprefix("<|start|>assistant")
                .replace("<|channel|>commentary json", " <|constrain|>json")
                .lstrip()
            )
        assert parsed(text, found) == [(name, arguments) for name in NAMES[:num_calls]]


@pytest.mark.parametrize("arguments", ARGUMENTS, ids=str)
@pytest.mark.parametrize("name", [name for name, f in KNOWN_FORMATS.items() if f.calls])
def test_what_this_server_writes_is_read(name: str, arguments: dict[str, Any]) -> None:
    known = KNOWN_FORMATS[name]
    assert known.calls is not None
    if known.calls.style is CallStyle.HARMONY:
        return
    for names in (NAMES[:1], NAMES):
        calls = [{"function": {"name": name, "arguments": arguments}} for name in names]
        assert parsed(write_calls(calls, known.calls), known) == [(n, arguments) for n in names]
