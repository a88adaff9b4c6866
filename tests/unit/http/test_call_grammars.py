"""Calls of strict tools in free text: each parser reads what its grammar lets a model write."""

import json
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLTokenizer

from http_proc.answer.events import ParsedAnswer
from http_proc.answer.parser import ToolSchemas, make_parser
from http_proc.chat.call import ChatCall
from http_proc.chat.call_grammars import strict_calls
from http_proc.protocol.sampling import Sampling
from http_proc.protocol.schema import FunctionSchema, Tool
from quadriga.answer_format import AnswerFormat
from quadriga.known_formats import KNOWN_FORMATS
from quadriga.sampling.grammar import compile_grammar, to_library_form
from quadriga.sampling.params import SamplingParams, grammar_of
from tests.unit.scripted_ring import HERMES, LLAMA3
from tests.unit.tiny_vocabulary import tiny_vocabulary

PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/city"}},
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"city": {"type": "string"}},
}
TOOLS = [
    Tool(FunctionSchema("weather", parameters=PARAMETERS, strict=True)),
    Tool(FunctionSchema("lax", parameters={"type": "array"})),
]
MISTRAL = KNOWN_FORMATS["mistral"].calls
FORMATS: dict[str, Any] = {"hermes": HERMES, "mistral": MISTRAL, "llama3": LLAMA3}
ROME: Any = ("weather", {"city": "Rome"})
ANY: Any = ("lax", {"x": [1]})
WRONG: Any = ("weather", {"town": "Rome"})
UNKNOWN: Any = ("time", {"city": "Rome"})


def hermes(*calls: Any) -> str:
    return "\n".join(
        f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(given)}}}\n</tool_call>'
        for name, given in calls
    )


def mistral_list(*calls: Any) -> str:
    listed = [{"name": name, "arguments": given} for name, given in calls]
    return f"[TOOL_CALLS] {json.dumps(listed)}"


def mistral_named(*calls: Any) -> str:
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{json.dumps(given)}" for name, given in calls)


def mistral_bare(*calls: Any) -> str:
    return "".join(f"[TOOL_CALLS]{name}{json.dumps(given)}" for name, given in calls)


def llama3(*calls: Any) -> str:
    return "; ".join(
        f'{{"name": "{name}", "parameters": {json.dumps(given)}}}' for name, given in calls
    )


@pytest.fixture(scope="module", params=[(), ("[TOOL_CALLS]", "[ARGS]", "<tool_call>")])
def vocabulary(llama_dir: Path, request: pytest.FixtureRequest) -> LLTokenizer:
    """A vocabulary without special tokens for calls, and one with some."""
    return tiny_vocabulary(llama_dir, 520, *request.param)


@pytest.mark.parametrize("write", [hermes, mistral_list, mistral_named, mistral_bare, llama3])
def test_calls_of_strict_tools_obey_them_and_are_read(vocabulary: LLTokenizer, write: Any) -> None:
    calls_format = FORMATS[write.__name__.partition("_")[0]]
    call = ChatCall(messages=[], sampling=Sampling(SamplingParams(), {}), tools=TOOLS)
    fields = strict_calls(call, calls_format)
    grammar = grammar_of(SamplingParams(**fields))
    assert grammar is not None
    beginning = compile_grammar(vocabulary, to_library_form(grammar, vocabulary))

    def obeys(text: str) -> bool:
        matcher = beginning.deep_copy()
        ids = vocabulary.tokenize_str(text, parse_special=True)
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()

    for calls in ([ROME], [ANY], [ROME, ANY]):
        assert obeys(write(*calls))
        tools = ToolSchemas({tool.function.name: {} for tool in TOOLS})
        parser, parsed = make_parser(AnswerFormat(calls=calls_format), tools=tools), ParsedAnswer()
        parsed.add(parser.push(write(*calls)))
        parsed.add(parser.finish())
        read = [(call.name, json.loads(call.arguments)) for call in parsed.calls]
        assert read == calls
    for wrong in (WRONG, UNKNOWN):
        assert not obeys(write(wrong)) and not obeys(write(ROME, wrong))
    for text in ("", "It is warm, they say: [] 25 °C\n", ' "x" {"name": "time"}'):
        assert obeys(text)
