"""Answers of every known format are parsed, however they are cut into pieces."""

import itertools
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from http_proc.answer.events import ArgumentsDelta, CallBegin, CallEnd, TextDelta
from http_proc.answer.parser import make_parser
from quadriga.server.answer_format import KNOWN_FORMATS, from_info, to_info
from tests.unit.http.answer.recorded import (
    ANSWERS,
    RICH_JSON,
    ROME_JSON,
    TOOLS,
    Recorded,
    hermes,
    kimi,
    meaning,
    parse,
)

CALL_FORMATS = sorted(name for name, value in KNOWN_FORMATS.items() if value.calls)


def parse_recorded(recorded: Recorded, pieces: list[str]) -> Any:
    begins = recorded.begins_in_reasoning
    return parse(recorded.source, pieces, begins_in_reasoning=begins)


def pieces_at(text: str, cuts: list[int]) -> list[str]:
    ends = [0, *sorted(cuts), len(text)]
    return [text[start:end] for start, end in itertools.pairwise(ends)]


@pytest.mark.parametrize("recorded", ANSWERS, ids=lambda recorded: recorded.source)
def test_an_answer_means_what_the_model_meant(recorded: Recorded) -> None:
    answer = parse_recorded(recorded, [recorded.answer])
    read = tuple((call.name, json.loads(call.arguments)) for call in answer.calls)
    assert read == recorded.calls
    assert (answer.text, answer.reasoning) == (recorded.text, recorded.reasoning)
    assert all(call.is_complete for call in answer.calls)


def test_the_answers_are_of_all_known_formats() -> None:
    assert {recorded.source for recorded in ANSWERS} == KNOWN_FORMATS.keys()


@pytest.mark.parametrize("source", sorted(KNOWN_FORMATS))
def test_an_answer_means_the_same_wherever_it_is_cut(source: str) -> None:
    for recorded in ANSWERS:
        if recorded.source == source:
            text = recorded.answer
            whole = meaning(parse_recorded(recorded, [text]))
            assert meaning(parse_recorded(recorded, list(text))) == whole
            for cut in range(len(text)):
                assert meaning(parse_recorded(recorded, [text[:cut], text[cut:]])) == whole


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_an_answer_means_the_same_however_it_is_cut(data: st.DataObject) -> None:
    recorded = data.draw(st.sampled_from(ANSWERS))
    text = recorded.answer[: data.draw(st.integers(0, len(recorded.answer)))]
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=30))
    whole = meaning(parse_recorded(recorded, [text]))
    assert meaning(parse_recorded(recorded, pieces_at(text, cuts))) == whole


def fragments(source: str) -> st.SearchStrategy[str]:
    """Return texts of what a format consists of, in any order."""
    known = KNOWN_FORMATS[source]
    values: list[Any] = []
    for part in (known.calls, known.reasoning):
        for value in (to_info_values(part) if part else {}).values():
            values += value if isinstance(value, list | tuple) else [value]
    marks = [value for value in values if isinstance(value, str) and value]
    halves = [mark[: len(mark) // 2] for mark in marks] + [mark[len(mark) // 2 :] for mark in marks]
    words = [
        "weather",
        "time",
        "x",
        " ",
        "\n",
        "7",
        '"',
        "'",
        "\\",
        "\\u12",
        "{",
        "}",
        "[",
        "]",
        "(",
    ]
    words += [")", ",", ":", "=", ";", "{}", "()", "true", "é🚀", RICH_JSON, ROME_JSON, "city"]
    words += ['{"name": "time", "arguments": ', '"arguments": {}', '"name": "f"', "<|message|>"]
    words += [
        "\\ud83d",
        "\\ude80",
        "<|end|>",
        "<|start|>assistant",
        "<|channel|>final",
        " to=functions.f",
    ]
    answers = [recorded.answer for recorded in ANSWERS if recorded.source == source]
    choice = st.one_of(*(st.sampled_from(group) for group in (marks, halves, words, answers)))
    return st.lists(choice, max_size=20).map("".join)


def to_info_values(part: Any) -> dict[str, Any]:
    return {name: getattr(part, name) for name in part.__struct_fields__}


@pytest.mark.parametrize("source", sorted(KNOWN_FORMATS))
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_any_text_means_the_same_however_it_is_cut(source: str, data: st.DataObject) -> None:
    text = data.draw(fragments(source))
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=20))
    options: dict[str, Any] = {
        "begins_in_reasoning": data.draw(st.booleans()),
        "parses_reasoning": data.draw(st.booleans()),
        "max_calls": data.draw(st.sampled_from([None, 1])),
        "tools": data.draw(st.sampled_from([TOOLS, None])),
    }
    answer = parse(source, [text], **options)
    assert meaning(parse(source, pieces_at(text, cuts), **options)) == meaning(answer)
    assert meaning(parse(source, list(text), **options)) == meaning(answer)
    for call in answer.calls:
        if call.is_complete:
            arguments = json.loads(call.arguments)
            assert isinstance(arguments, dict)
            assert json.dumps(arguments, ensure_ascii=False).encode()
    if options["tools"] is None and not options["parses_reasoning"] and source != "harmony":
        assert answer.text == text


@pytest.mark.parametrize("source", CALL_FORMATS)
def test_without_tools_calls_are_text(source: str) -> None:
    for recorded in ANSWERS:
        if recorded.source == source:
            begins = recorded.begins_in_reasoning
            answer = parse(source, [recorded.answer], None, begins_in_reasoning=begins)
            assert not answer.calls
            assert answer.reasoning == recorded.reasoning


def test_a_name_is_sent_as_soon_as_the_arguments_begin() -> None:
    parser = make_parser(KNOWN_FORMATS["hermes"], tools=TOOLS)
    assert parser.push('<tool_call>\n{"name": "weather", "arguments": ') == []
    begin, delta = parser.push('{"ci')
    assert isinstance(begin, CallBegin) and begin.name == "weather"
    assert delta == ArgumentsDelta('{"ci')
    assert parser.push('ty": "Ro') == [ArgumentsDelta('ty": "Ro')]
    assert parser.push('me"}') == [ArgumentsDelta('me"}'), CallEnd()]
    assert parser.push("}\n</tool_call>") == []


def test_strings_between_marks_are_streamed() -> None:
    parser = make_parser(KNOWN_FORMATS["qwen3_coder"], tools=TOOLS)
    parser.push("<tool_call>\n<function=run>\n<parameter=code>\n")
    assert parser.push('a "b"') == [ArgumentsDelta('a \\"b\\"')]
    assert parser.push("\n</par") == []
    assert parser.push("t") == [ArgumentsDelta("\\n</part")]


@pytest.mark.parametrize("mark", ["<tool_call>", "<think>"])
def test_a_mark_is_never_sent_in_part(mark: str) -> None:
    parser = make_parser(KNOWN_FORMATS["qwen3"], tools=TOOLS)
    parser.push("" if mark == "<think>" else "x ")
    for length in range(1, len(mark)):
        assert parser.push(mark[length - 1 : length]) == []
    assert parser.push("!") == [TextDelta(f"{mark[:-1]}!")]


def test_a_call_that_is_cut_off_has_begun_and_not_ended() -> None:
    for source, text, arguments in [
        ("hermes", hermes("weather", ROME_JSON).partition("}")[0], '{"city": "Rome"'),
        ("qwen3_coder", "<function=weather><parameter=city>Ro", '{"city": "Ro'),
        ("qwen3_coder", "<function=weather><parameter=days>1", '{"days": 1'),
        ("pythonic", "[weather(city='Ro", '{"city": "Ro'),
        ("gemma4", '<|tool_call>call:weather{city:<|"|>Ro', '{"city":"Ro'),
        ("mistral", "[TOOL_CALLS]weather[ARGS]{", "{"),
        ("harmony", '<|channel|>commentary to=functions.f<|message|>{"a": tr', '{"a": tr'),
    ]:
        (call,) = parse(source, [text]).calls
        assert (call.arguments, call.is_complete) == (arguments, False), source


def test_a_call_that_is_cut_off_before_its_arguments_is_text() -> None:
    text = '<tool_call>\n{"name": "weather", "arguments":'
    assert meaning(parse("hermes", [text])) == ("", text, [])


def test_a_call_that_is_complete_needs_no_mark_after_it() -> None:
    text = '<tool_call>\n{"name": "time", "arguments": {}'
    for end in ("", "}", "}\n", "}\n</tool_", "}\n</tool_call>"):
        assert meaning(parse("hermes", [text + end])) == ("", "", [("time", "{}", True)])


def test_broken_arguments_are_what_the_model_wrote_and_do_not_end() -> None:
    text = (
        f'<tool_call>{{"name": "f", "arguments": {{"a": 1 2}}}}</tool_call>{hermes("time", "{}")}.'
    )
    calls = [("f", '{"a": 1 2}}', False), ("time", "{}", True)]
    assert meaning(parse("hermes", [text])) == ("", ".", calls)


def test_strings_that_json_forbids_are_repaired() -> None:
    text = hermes("run", '{"code": "a\nb\t\\d \\\\ \\u00e9 \\ud83d\\ude80 \\ud83d \\ude80",}')
    (call,) = parse("hermes", [text]).calls
    assert json.loads(call.arguments) == {"code": "a\nb\t\\d \\ é 🚀 � �"}


def test_models_that_write_ids_keep_them() -> None:
    mistral = parse("mistral", ["[TOOL_CALLS]time[CALL_ID]a1b2c3d4e[ARGS]{}"])
    assert mistral.calls[0].id == "a1b2c3d4e"
    text = f"<|tool_calls_section_begin|>{kimi(3, 'time', '{}')}<|tool_calls_section_end|>"
    assert parse("kimi_k2", [text]).calls[0].id == "functions.time:3"


def test_calls_after_the_last_that_is_allowed_are_dropped() -> None:
    text = f"a{hermes('time', '{}')}\n{hermes('weather', ROME_JSON)}b"
    answer = parse("hermes", [text], max_calls=1)
    assert meaning(answer) == ("", "ab", [("time", "{}", True)])


def test_reasoning_that_is_not_parsed_stays_in_the_text() -> None:
    text = f"<think>\na {hermes('time', '{}')}\n</think>\n\nb"
    answer = parse("qwen3", [text], parses_reasoning=False)
    assert meaning(answer) == ("", text, [])


@pytest.mark.parametrize("source", sorted(KNOWN_FORMATS))
def test_formats_go_through_the_info_of_the_server(source: str) -> None:
    assert from_info(to_info(KNOWN_FORMATS[source])) == KNOWN_FORMATS[source]


def test_broken_arguments_in_a_string_end_where_they_break() -> None:
    whole = '<tool_call>{"name": "f", "arguments": "{me<tool_call>{\\"name\\": 1'
    for text in (whole, f"{whole}</tool_call>"):
        broken = meaning(parse("hermes", [text]))
        assert broken[2][0] == ("f", "{me", False)
        assert meaning(parse("hermes", list(text))) == broken


@pytest.mark.parametrize("source", ["hermes", "mistral", "lfm2"])
def test_what_is_too_long_for_a_name_is_text(source: str) -> None:
    open_mark = {
        "hermes": '<tool_call>{"',
        "mistral": "[TOOL_CALLS]",
        "lfm2": "<|tool_call_start|>",
    }
    text = open_mark[source] + "n" * 2000 + open_mark[source]
    for pieces in ([text], list(text)):
        assert meaning(parse(source, pieces)) == ("", text, [])


def test_arguments_that_no_decoder_could_read_are_broken() -> None:
    for depth, is_complete in ((100, True), (1000, False)):
        arguments = '{"a": ' + "[" * depth + "]" * depth + "}"
        (call,) = parse("hermes", [hermes("f", arguments)]).calls
        assert call.is_complete is is_complete


def test_an_object_without_a_mark_that_is_no_call_is_not_held_back() -> None:
    parser = make_parser(KNOWN_FORMATS["llama3_json"], tools=TOOLS)
    assert parser.push('{"result": ') == [TextDelta('{"result": ')]
    parser = make_parser(KNOWN_FORMATS["llama3_json"], tools=TOOLS)
    assert parser.push('{"name": "Ann", ') == [TextDelta('{"name": "Ann", ')]


CALL = '{"name": "weather", "arguments": {"city": "Rome"}}'
TIME = '{"name": "time", "arguments": {}}'
UNMARKED = (
    CALL,
    f"\n{CALL}\n",
    f"[{CALL}]",
    f"```json\n{CALL}\n```",
    f"```\n{CALL}\n```",
    f"```json\n[\n  {CALL}\n]\n```",
    f"```json\n{CALL}",
    f"<tools>\n{CALL}\n</tools>",
    f"<function_call>{CALL}</function_call>",
    '```json\n{\n  "arguments": {"city": "Rome"},\n  "name": "weather"\n}\n```\n',
    f'{CALL[:-1]}, "type": "function"}}',
)
# gpt-oss writes calls to channels of their own.
UNMARKED_FORMATS = [name for name in CALL_FORMATS if name != "harmony"]


def parse_unmarked(source: str, pieces: list[str], **options: Any) -> Any:
    return parse(source, pieces, takes_unmarked=True, **options)


@pytest.mark.parametrize("source", ["hermes", "qwen3", "mistral", "deepseek_v3", "command_r7b"])
@pytest.mark.parametrize("text", UNMARKED)
def test_a_call_without_the_marks_of_its_format_is_a_call_wherever_it_is_cut(
    source: str, text: str
) -> None:
    if source == "command_r7b":
        text = text.replace('"name"', '"tool_name"')
    for pieces in (list(text), *([text[:cut], text[cut:]] for cut in range(len(text)))):
        answer = parse_unmarked(source, pieces)
        (call,) = answer.calls
        assert (call.name, json.loads(call.arguments)) == ("weather", {"city": "Rome"})
        assert call.is_complete and answer.text == ""
    assert parse(source, [text]).calls == [] and parse(source, [text]).text == text


@pytest.mark.parametrize("source", UNMARKED_FORMATS)
def test_a_markdown_block_is_a_call_in_every_format(source: str) -> None:
    calls = KNOWN_FORMATS[source].calls
    name_key = (calls and calls.name_key) or "name"
    text = f"```json\n{CALL}\n```".replace('"name"', f'"{name_key}"')
    for pieces in ([text], list(text)):
        answer = parse_unmarked(source, pieces)
        assert [call.name for call in answer.calls] == ["weather"] and answer.text == ""


def test_gpt_oss_has_no_calls_without_marks() -> None:
    text = f"<|channel|>final<|message|>```json\n{CALL}\n```"
    assert meaning(parse_unmarked("harmony", [text])) == ("", f"```json\n{CALL}\n```", [])


def test_calls_without_marks_follow_text_and_each_other() -> None:
    for text in (
        f"I look.\n\n```json\n{CALL}\n```\n\n```json\n{TIME}\n```",
        f"I look.\n```json\n{CALL}\n{TIME}\n```",
        f"I look.\n```\n[{CALL}, {TIME}]\n```\n",
        f"I look.<tools>{CALL}</tools>{hermes('time', '{}')}",
    ):
        for pieces in ([text], list(text)):
            answer = parse_unmarked("hermes", pieces)
            assert [call.name for call in answer.calls] == ["weather", "time"]
            assert answer.text.strip() == "I look."


def test_text_after_a_block_of_calls_is_kept() -> None:
    text = f"```json\n{CALL}\n```\n\nThis asks for the weather:\n```json\n{TIME}\n```"
    for pieces in ([text], list(text)):
        answer = parse_unmarked("hermes", pieces)
        assert [call.name for call in answer.calls] == ["weather"]
        assert answer.text == text.removeprefix(f"```json\n{CALL}\n```")


def test_an_unmarked_answer_may_end_with_the_mark_that_closes_calls() -> None:
    for text in (f"{CALL}\n</tool_call>", f"{CALL}\n</tool_", f"{CALL}\n{TIME}\n</tool_call>\n"):
        for pieces in ([text], list(text)):
            answer = parse_unmarked("hermes", pieces)
            assert (answer.calls[0].name, answer.text) == ("weather", "")


NO_CALLS = (
    '{"name": "unknown", "arguments": {}}',
    '{"name": "weather"}',
    '```json\n{"name": "weather", "city": "Rome"}\n```',
    '```json\n{"city": "Rome"}\n``` and ```\nls\n```\n',
    '```python\nprint({"name": "weather", "arguments": {}})\n```',
    f"It is {CALL}",
    f"{CALL} is a call.",
    f"{CALL}\n{{}}",
    f"Write ```{CALL}``` to call.",
    f"```json\n{CALL}\nis a call\n```",
    f"```python\n1\n```\n```json\n{CALL}\n```",
    f'```json\n{{"calls": [{CALL}]}}\n```',
    f'```json\n{CALL[:-1]}, "description": "the weather"}}\n```',
    f"```json\n[{CALL}, 1]\n```",
    f"```json\n[{CALL}, {CALL}\n```",
    f"```json\n{CALL[:-1]}",
    f"```json\n{CALL[:-9]}\n```",
    f"[{CALL}",
    "```json\n[1, 2]\n```",
    "```json\n[]\n```",
    "```json",
    "\n```",
    "a ``` b <tools>x</tools> {",
    "{",
    "[",
    f"<tools>{CALL}, no</tools>",
)


@pytest.mark.parametrize("text", NO_CALLS)
def test_what_has_not_the_form_of_a_call_stays_text(text: str) -> None:
    for pieces in ([text], list(text), *([text[:at], text[at:]] for at in range(len(text)))):
        answer = parse_unmarked("hermes", pieces)
        assert (answer.text, answer.calls) == (text, [])


MARKDOWN = (
    "```json", "```", "```python", "\n", "\n\n", " ", "{", "}", "[", "]", ",", ":", '"', "\\",
    "<tools>", "</tools>", "<function_call>", '"name": ', '"arguments": ', '"parameters": ', '"x"',
    "{}", "null", '{"name": "x", "arguments": {}}', '{"arguments": {"a": [1, "}"]}, "name": ',
    "I look. ", "é🚀",
)  # fmt: skip


def texts(words: tuple[str, ...]) -> st.SearchStrategy[str]:
    return st.lists(st.sampled_from(words), max_size=16).map("".join)


@pytest.mark.parametrize("source", ["hermes", "qwen3_coder", "mistral", "deepseek_v3", "granite"])
@given(text=texts(MARKDOWN), cuts=st.lists(st.integers(0, 200), max_size=20))
@settings(max_examples=300, deadline=None)
def test_text_without_the_name_of_a_tool_is_unchanged_however_it_is_cut(
    source: str, text: str, cuts: list[int]
) -> None:
    for pieces in ([text], list(text), pieces_at(text, [min(cut, len(text)) for cut in cuts])):
        assert meaning(parse_unmarked(source, pieces)) == ("", text, [])


@pytest.mark.parametrize("source", UNMARKED_FORMATS)
@given(
    text=texts((*MARKDOWN, '"weather"', CALL, TIME, f"\n```json\n{CALL}\n```", f"[{CALL}, ")),
    cuts=st.lists(st.integers(0, 300), max_size=20),
)
@settings(max_examples=100, deadline=None)
def test_text_with_calls_without_marks_means_the_same_however_it_is_cut(
    source: str, text: str, cuts: list[int]
) -> None:
    answer = parse_unmarked(source, [text])
    cuts = [min(cut, len(text)) for cut in cuts]
    assert meaning(parse_unmarked(source, pieces_at(text, cuts))) == meaning(answer)
    assert meaning(parse_unmarked(source, list(text))) == meaning(answer)
    if not answer.calls:
        assert answer.text == text


def test_text_is_held_back_only_while_it_may_become_a_call() -> None:
    for pieces in (
        ("```", "python\n"),
        ("```json\n", "[1"),
        ("{", '"city": '),
        ('{"name": ', '"unknown"'),
        (CALL, "."),
        (f"```json\n{CALL}\n", "x"),
    ):
        parser = make_parser(KNOWN_FORMATS["hermes"], tools=TOOLS, takes_unmarked=True)
        *held, last = pieces
        assert [parser.push(piece) for piece in held] == [[] for _ in held]
        written = [event.text for event in parser.push(last) if isinstance(event, TextDelta)]
        assert "".join(written).startswith("".join(held))


def test_a_call_in_a_block_is_written_when_the_block_ends() -> None:
    parser = make_parser(KNOWN_FORMATS["hermes"], tools=TOOLS, takes_unmarked=True)
    assert parser.push(f"```json\n{CALL}\n") == []
    begin, arguments, end = parser.push("```")
    assert isinstance(begin, CallBegin) and begin.id
    assert (arguments, end) == (ArgumentsDelta('{"city": "Rome"}'), CallEnd())
