"""Forced and strict calls: a grammar has the model's own form, and the parser reads it."""

import json
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLTokenizer

from http_proc.answer.events import ParsedAnswer
from http_proc.answer.parser import make_parser
from http_proc.core.errors import ApiError
from http_proc.generation.call_grammars import (
    PLAIN_CALL,
    forced_calls,
    in_final_message,
    strict_calls,
    strict_calls_or_json,
)
from http_proc.generation.schema import FunctionSchema, Tool
from quadriga.sampling.params import SamplingParams, grammar_of
from quadriga.server.answer_format import AnswerFormat, CallFormat
from tests.unit.http.call_grammars import (
    MARKS,
    NO_PARAMETERS,
    OSLO,
    ROME,
    SCHEMAS,
    TIME,
    TOOLS,
    Obeys,
    chat_call,
    written,
)
from tests.unit.tiny_vocabulary import tiny_vocabulary

CASES = [[ROME], [OSLO], [TIME], [ROME, TIME, OSLO]]
WRONG = [
    ("weather", {"city": "Rome"}),
    ("weather", {"city": "Rome", "days": "x"}),
    ("weather", {"city": "Rome", "days": 1, "unit": "K"}),
    ("rain", {"city": "Rome", "days": 1}),
]


# Marks that are special tokens of the second vocabulary.
SPECIAL_TOKENS = [
    "[TOOL_CALLS]", "[ARGS]", "<tool_call>", "</tool_call>", "<|python_start|>", "<|channel|>",
    "<|message|>", "<|constrain|>", "<|call|>", "<|start|>", "<|end|>", "<|tool_call>", '<|"|>',
]  # fmt: skip
SIZE = 540


@pytest.fixture(scope="module", params=[[], SPECIAL_TOKENS])
def vocabulary(llama_dir: Path, request: pytest.FixtureRequest) -> LLTokenizer:
    """A vocabulary without special tokens for calls, and one with some."""
    return tiny_vocabulary(llama_dir, SIZE, *request.param)


def read(marks: CallFormat, text: str) -> tuple[str, list[Any]]:
    """Return the text and the calls that the parser reads."""
    parser, parsed = make_parser(AnswerFormat(calls=marks), tools=SCHEMAS), ParsedAnswer()
    parsed.add(parser.push(text))
    parsed.add(parser.finish())
    assert all(call.is_complete for call in parsed.calls)
    return parsed.text, [(call.name, json.loads(call.arguments)) for call in parsed.calls]


def cases_of(name: str) -> list[list[Any]]:
    """Return the cases that a format can write: an answer of gpt-oss has one call."""
    return [case for case in CASES if len(case) == 1 or name != "harmony"]


@pytest.mark.parametrize("name", MARKS)
def test_forced_calls_are_written_in_the_models_own_form_and_read(
    vocabulary: LLTokenizer, name: str
) -> None:
    grammar, marks = forced_calls(chat_call(), MARKS[name])
    assert marks == MARKS[name]
    obeys = Obeys(vocabulary, grammar)
    for calls in cases_of(name):
        text = written(name, calls)
        assert obeys(text), text
        assert read(marks, text) == ("", calls)
    for wrong in WRONG:
        assert not obeys(written(name, [wrong]))
    for text in ("", "It is warm.", "{}", written(name, [ROME]) + " and text"):
        assert not obeys(text)


@pytest.mark.parametrize("name", MARKS)
def test_a_named_function_is_called_once_and_no_other(vocabulary: LLTokenizer, name: str) -> None:
    obeys = Obeys(vocabulary, forced_calls(chat_call(name="weather"), MARKS[name])[0])
    assert obeys(written(name, [ROME]))
    assert not obeys(written(name, [TIME]))
    assert not obeys(written(name, [ROME, ROME]))
    one = Obeys(vocabulary, forced_calls(chat_call(is_parallel=False), MARKS[name])[0])
    assert one(written(name, [ROME])) and one(written(name, [TIME]))
    assert not one(written(name, [ROME, ROME]))


LAX = {"weather": ("weather", {"city": "Rome", "days": 3}), "time": ("time", {"x": "y"})}


@pytest.mark.parametrize("name", MARKS)
def test_calls_of_strict_tools_in_text_obey_them_and_are_read(
    vocabulary: LLTokenizer, name: str
) -> None:
    tools = [TOOLS[0], Tool(FunctionSchema("time", parameters=NO_PARAMETERS))]
    strict = strict_calls(chat_call(tools=tools), MARKS[name])
    obeys = Obeys(vocabulary, strict)
    marks = MARKS[name]
    final = "<|channel|>final<|message|>" if name == "harmony" else ""
    for text in ("It is warm, they say:\n ([25 °C])", "Less < more, a `tool_call`"):
        assert obeys(final + text)
    is_alone = name == "harmony" or not (marks.open or marks.call_open or marks.name_open)
    before = "" if is_alone else "Let me see. "
    for calls in cases_of(name):
        text = written(name, calls)
        assert obeys(before + text), text
        assert read(marks, before + text) == (before, calls)
    assert obeys(written(name, [LAX["time"]])), "a tool that is not strict takes any arguments"
    for wrong in WRONG:
        assert not obeys(before + written(name, [wrong]))
    if not is_alone:
        one = Obeys(vocabulary, strict_calls(chat_call(is_parallel=False), marks))
        assert one(before + written(name, [ROME])) and not one(written(name, [ROME, TIME]))


@pytest.mark.parametrize("name", MARKS)
def test_an_answer_is_calls_or_json_where_both_are_asked_for(
    vocabulary: LLTokenizer, name: str
) -> None:
    schema = {"type": "object", "properties": {"warm": {"type": "boolean"}}, "required": ["warm"]}
    obeys = Obeys(vocabulary, strict_calls_or_json(chat_call(), MARKS[name], schema))
    final = "<|channel|>final<|message|>" if name == "harmony" else ""
    assert obeys(final + '{"warm": true}')
    for text in ("It is warm.", "", '{"warm": 5}', '{"warm": true} and text'):
        assert not obeys(final + text)
    for calls in cases_of(name):
        # Calls that are JSON without a mark are one at most, lest they are taken for the text.
        assert obeys(written(name, calls)) == (len(calls) == 1 or name != "llama3_json")
    for wrong in WRONG:
        assert not obeys(written(name, [wrong]))


def with_city(schema: Any) -> list[Tool]:
    parameters = {"type": "object", "properties": {"city": schema}, "required": ["city"]}
    return [Tool(FunctionSchema("weather", parameters=parameters, strict=True))]


@pytest.mark.parametrize(
    ("name", "schema"),
    [
        ("qwen3_coder", {"type": "string", "pattern": "^[A-Z]+$"}),
        ("glm45", {"$ref": "#/$defs/none"}),
        ("gemma4", {"type": "array", "items": {"type": "string"}, "minItems": 2}),
        ("gemma4", {"type": ["string", "null"]}),
        ("gemma4", {"type": "object"}),
    ],
)
def test_a_forced_call_is_plain_json_where_the_form_of_the_model_cannot_obey(
    name: str, schema: Any
) -> None:
    _, marks = forced_calls(chat_call(tools=with_city(schema)), MARKS[name])
    assert marks == PLAIN_CALL
    with pytest.raises(ApiError, match=r"tools\[1\] \(weather\) has .*leave strict out"):
        strict_calls(chat_call(tools=[TOOLS[1], *with_city(schema)]), MARKS[name])


@pytest.mark.parametrize(
    ("name", "schema", "values", "wrong"),
    [
        ("gemma4", {"type": "array", "items": {"enum": ["a", 1]}}, [[], ["a"], [1]], [["b"]]),
        ("gemma4", {"type": "object", "properties": {"a": {"type": "string"}, "b": {}},
                    "required": ["a"]}, [], [{}]),
        ("qwen3_coder", {"anyOf": [{"type": "integer"}, {"type": "null"}]}, [1, None], ["x"]),
        ("qwen3_coder", {"type": "array", "items": {"type": "integer"}}, [[1, 2]], [["x"]]),
        ("pythonic", {"type": "string", "maxLength": 3}, ["abc"], ["abcd"]),
        ("hermes", {"type": "string", "pattern": "^a+$"}, ["aa"], ["b"]),
    ],
)  # fmt: skip
def test_values_obey_their_schema(
    llama_dir: Path, name: str, schema: Any, values: list[Any], wrong: list[Any]
) -> None:
    vocabulary = tiny_vocabulary(llama_dir, SIZE)
    grammar, marks = forced_calls(chat_call(tools=with_city(schema)), MARKS[name])
    if not values:
        assert marks == PLAIN_CALL
        return
    obeys = Obeys(vocabulary, grammar)
    quote = MARKS[name].quote

    def call_of(value: Any) -> str:
        text = written(name, [("weather", {"city": value})])
        return text.replace('"a"', f"{quote}a{quote}") if quote else text

    assert all(obeys(call_of(value)) for value in values)
    assert not any(obeys(call_of(value)) for value in wrong)


@pytest.mark.parametrize(
    ("fields", "obeying", "wrong"),
    [
        ({"json_schema": {"const": 5}}, "5", "6"),
        ({"json_schema": '{"const": 5}'}, "5", "6"),
        ({"regex": "a+"}, "aa", "b"),
        ({"choice": ["yes", "no"]}, "no", "maybe"),
    ],
)
def test_a_grammar_of_gpt_oss_holds_for_the_final_message(
    vocabulary: LLTokenizer, fields: Any, obeying: str, wrong: str
) -> None:
    params = in_final_message(SamplingParams(**fields))
    assert grammar_of(params) is not None, "there is one grammar"
    obeys = Obeys(vocabulary, {"structural_tag": params.structural_tag})
    thoughts = "<|channel|>analysis<|message|>Hm, 5?<|end|><|start|>assistant"
    for before in ("", thoughts):
        assert obeys(f"{before}<|channel|>final<|message|>{obeying}")
        assert not obeys(f"{before}<|channel|>final<|message|>{wrong}")
    for given in (SamplingParams(ebnf='root ::= "a"'), SamplingParams(json_schema="{")):
        assert in_final_message(given) is given


def test_calls_of_a_model_without_a_form_are_plain_json(vocabulary: LLTokenizer) -> None:
    grammar, marks = forced_calls(chat_call(), None)
    assert (grammar, marks) == forced_calls(chat_call(), PLAIN_CALL) and marks == PLAIN_CALL
    text = '{"name": "weather", "arguments": {"city": "Rome", "days": 3}}'
    assert Obeys(vocabulary, grammar)(text)
    assert read(PLAIN_CALL, text) == ("", [("weather", {"city": "Rome", "days": 3})])


def test_a_model_that_has_not_learned_to_call_tools_calls_one(vocabulary: LLTokenizer) -> None:
    grammar, _ = forced_calls(chat_call(), MARKS["hermes"], is_trained=False)
    obeys = Obeys(vocabulary, grammar)
    assert obeys(written("hermes", [ROME])) and not obeys(written("hermes", [ROME, ROME]))
