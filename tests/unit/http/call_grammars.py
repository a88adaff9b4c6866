"""Tools, calls of them, and whether a text obeys a grammar of calls."""

import json
from typing import Any

from llguidance import LLTokenizer

from http_proc.answer.parser import ToolSchemas
from http_proc.generation.chat_call import ChatCall, ToolChoice, ToolMode
from http_proc.generation.sampling import Sampling
from http_proc.generation.schema import FunctionSchema, Tool
from quadriga.sampling.params import SamplingParams, grammar_of
from quadriga.server.answer_format import KNOWN_FORMATS
from quadriga.server.grammars.grammar import compile_grammar, to_library_form

PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"$ref": "#/$defs/city"},
        "days": {"type": "integer"},
        "unit": {"enum": ["C", "F"]},
        "exact": {"type": "boolean"},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"city": {"type": "string"}},
}
NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
TOOLS = [
    Tool(FunctionSchema("weather", parameters=PARAMETERS, strict=True)),
    Tool(FunctionSchema("time", parameters=NO_PARAMETERS, strict=True)),
]
SCHEMAS = ToolSchemas({"weather": PARAMETERS, "time": NO_PARAMETERS})
ROME = ("weather", {"city": "Rome 👋", "days": 3})
OSLO = ("weather", {"city": 'a <b> "c", {d}', "days": -1, "unit": "F", "exact": True})
TIME: tuple[str, dict[str, Any]] = ("time", {})
MARKS = {name: found.calls for name, found in KNOWN_FORMATS.items() if found.calls is not None}


def value_in_style(name: str, value: Any) -> str:
    marks = MARKS[name]
    if marks.style.value == "quoted" and isinstance(value, str):
        return f"{marks.quote}{value}{marks.quote}"
    if marks.style.value == "tagged" and isinstance(value, str):
        return value
    if marks.style.value == "pythonic" and isinstance(value, bool):
        return str(value)
    return json.dumps(value, ensure_ascii=False)


def call_in_style(name: str, function: str, given: dict[str, Any], number: int) -> str:
    """Return a call without the marks around calls, written independently of the grammars."""
    marks, arguments = MARKS[name], json.dumps(given, ensure_ascii=False)
    values = {key: value_in_style(name, value) for key, value in given.items()}
    match marks.style.value:
        case "json" if not marks.name_key:
            return f'{marks.call_open}{{"{function}": {arguments}}}{marks.call_close}'
        case "json":
            body = f'"{marks.name_key}": "{function}", "{marks.arguments_key}": {arguments}'
            return f"{marks.call_open}{{{body}}}{marks.call_close}"
        case "named_json" | "harmony":
            index = f"{marks.index_open}{number}" if marks.index_open else ""
            body = f"{marks.name_open}{function}{index}{marks.name_close}{arguments}"
            return f"{marks.call_open}{body}{marks.call_close}"
        case "tagged":
            parts = ""
            for key, value in values.items():
                is_string = isinstance(given[key], str)
                key_close = (is_string and marks.string_key_close) or marks.key_close
                parts += f"{marks.key_open}{key}{key_close}{value}{marks.value_close}"
            return f"{marks.name_open}{function}{marks.name_close}{parts}{marks.call_close}"
        case "pythonic":
            return f"{function}({', '.join(f'{key}={value}' for key, value in values.items())})"
    body = ",".join(f"{key}:{value}" for key, value in values.items())
    return f"{marks.name_open}{function}{{{body}}}"


def written(name: str, calls: list[Any]) -> str:
    """Return an answer of calls as the models of a format write it."""
    marks = MARKS[name]
    texts = [
        call_in_style(name, function, given, number)
        for number, (function, given) in enumerate(calls)
    ]
    if marks.is_list or marks.style.value == "pythonic":
        return f"{marks.open}[{', '.join(texts)}]{marks.close}"
    if marks.call_open or marks.separator:
        return f"{marks.open}{marks.separator.join(texts)}{marks.close}"
    between = "\n" if marks.open.endswith("\n") else ""
    return between.join(f"{marks.open}{text}{marks.close}" for text in texts)


def chat_call(*, name: str = "", is_parallel: bool = True, tools: Any = TOOLS) -> ChatCall:
    return ChatCall(
        messages=[],
        sampling=Sampling(SamplingParams(), {}),
        tools=tools,
        tool_choice=ToolChoice(ToolMode.REQUIRED, name),
        is_parallel=is_parallel,
    )


class Obeys:
    """Whether texts obey a grammar."""

    def __init__(self, vocabulary: LLTokenizer, fields: dict[str, Any]) -> None:
        grammar = grammar_of(SamplingParams(**fields))
        assert grammar is not None
        self._vocabulary = vocabulary
        self._beginning = compile_grammar(vocabulary, to_library_form(grammar, vocabulary))

    def __call__(self, text: str) -> bool:
        matcher = self._beginning.deep_copy()
        ids = self._vocabulary.tokenize_str(text, parse_special=True)
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()
