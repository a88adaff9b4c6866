"""A forced answer ends at a call that repeats an earlier one, in every form and every API."""

import asyncio
import json
from typing import Any

import pytest
from llguidance import LLTokenizer

from http_proc.answer.events import AnswerEvent, ArgumentsDelta, CallBegin, CallEnd, ParsedAnswer
from http_proc.answer.parser import make_parser
from http_proc.generation.call_grammars import forced_calls
from http_proc.generation.schema import FunctionSchema, Tool
from quadriga.client.types import Completion, Timings
from quadriga.clock import now
from quadriga.server.answer_format import KNOWN_FORMATS, AnswerFormat
from quadriga.wire.client import Usage
from tests.unit.http.call_grammars import (
    MARKS,
    OSLO,
    ROME,
    SCHEMAS,
    TIME,
    Obeys,
    chat_call,
    written,
)
from tests.unit.scripted_ring import ScriptedRing, chunk, openai_before
from tests.unit.tiny_vocabulary import tiny_vocabulary

FORMS = sorted(MARKS.keys() - {"harmony"})
PARIS = ("weather", {"city": "Rome 👋", "days": 35})


def read(name: str, text: str, step: int) -> tuple[list[Any], bool]:
    """Return the calls of an answer that arrives in pieces, and whether it ended at a repeat."""
    parser = make_parser(AnswerFormat(calls=MARKS[name]), tools=SCHEMAS, ends_at_repeat=True)
    parsed = ParsedAnswer()
    for begin in range(0, len(text), step):
        parsed.add(parser.push(text[begin : begin + step]))
    was_over = parser.is_over
    parsed.add(parser.finish())
    assert parsed.text == ""
    return [(call.name, json.loads(call.arguments)) for call in parsed.calls], was_over


@pytest.mark.parametrize("step", [1, 7, 10_000])
@pytest.mark.parametrize("name", FORMS)
def test_a_repeat_ends_the_answer_in_every_form(name: str, step: int) -> None:
    for first in ([ROME], [OSLO, TIME], [ROME, PARIS, TIME], [TIME]):
        assert read(name, written(name, first), step) == (first, False)
        for repeat in first:
            assert read(name, written(name, [*first, repeat, OSLO, ROME]), step) == (first, True)


@pytest.mark.parametrize("name", FORMS)
def test_a_repeat_that_is_cut_off_is_no_call(name: str) -> None:
    text = written(name, [ROME, ROME])
    end = text.rindex("Rome")
    assert read(name, text[:end], 3) == ([ROME], False)


def test_calls_that_differ_are_kept_and_streamed_from_where_they_do() -> None:
    parser = make_parser(KNOWN_FORMATS["hermes"], tools=SCHEMAS, ends_at_repeat=True)
    parser.push(written("hermes", [ROME]) + "\n")
    text = written("hermes", [PARIS])
    held: list[AnswerEvent] = parser.push(text[: text.index("35") + 1])
    assert held == [], "so far it may be the first call again"
    events = parser.push("5}")
    assert [type(event) for event in events] == [CallBegin, ArgumentsDelta, CallEnd]
    assert "".join(e.text for e in events if isinstance(e, ArgumentsDelta)).endswith("35}")


def test_other_whitespace_does_not_make_another_call() -> None:
    first = (
        '<tool_call>\n{"name": "weather", "arguments": {"city": "a  b", "days": 1}}\n</tool_call>'
    )
    again = (
        first.replace('": ', '":').replace(", ", ",\n  ").replace('"weather",\n  ', '"weather", ')
    )
    parser = make_parser(KNOWN_FORMATS["hermes"], tools=SCHEMAS, ends_at_repeat=True)
    parser.push(f"{first}\n{again}")
    assert parser.is_over
    other = make_parser(KNOWN_FORMATS["hermes"], tools=SCHEMAS, ends_at_repeat=True)
    other.push(f"{first}\n" + first.replace("a  b", "a b"))
    assert not other.is_over, "whitespace within strings does"


def test_an_answer_whose_calls_are_not_forced_may_repeat_them() -> None:
    parser = make_parser(KNOWN_FORMATS["hermes"], tools=SCHEMAS)
    parsed = ParsedAnswer()
    parsed.add(parser.push(written("hermes", [TIME, TIME])))
    assert len(parsed.calls) == 2 and not parser.is_over


FIRST = '<tool_call>\n{"name": "roll", "arguments": {"sides": 6}}\n</tool_call>'
OTHER = FIRST.replace("6", "8")
ROLL = {"name": "roll", "parameters": {"type": "object", "properties": {"sides": {}}}}
TOOLS: Any = [{"type": "function", "function": ROLL}]
ASK: Any = {"model": "tiny", "messages": [{"role": "user", "content": "Go"}], "tools": TOOLS}


class LoopingRing(ScriptedRing):
    """Writes the pieces, and ends a request, with more tokens, when it is aborted."""

    def __init__(self, pieces: list[str]) -> None:
        super().__init__(pieces)
        self.leaves_open = True
        self.num_aborts = 0

    async def abort(self, request_id: str) -> None:
        self.num_aborts += 1
        index = int(request_id)
        params = self.submitted[index][1]
        for choice in range(params.n):
            text = "".join(self.pieces) + " and more"
            ids = list(range(len(self.pieces) + 3))
            usage = Usage(3, len(ids), 0)
            end = Completion("r", text, ids, "abort", usage, Timings(now(), token_times=[0.0] * 9))
            last = chunk(" and more", end)
            last.index = choice
            self.sinks[index](last)
        self.handles[index].done = True

    def _answer(self, handle: Any, sink: Any) -> None:
        params = self.submitted[int(handle.request_id)][1]
        for piece in self.pieces:
            for choice in range(params.n):
                part = chunk(piece)
                part.index = choice
                asyncio.get_running_loop().call_soon(sink, part)


@pytest.mark.parametrize("num_choices", [1, 3])
async def test_the_gateway_ends_a_request_at_a_repeat(num_choices: int) -> None:
    text = f"{FIRST}\n{OTHER}\n{FIRST}"
    ring = LoopingRing([*text, "\n", *FIRST])
    fields = {**ASK, "tool_choice": "required", "n": num_choices}
    async with openai_before(ring) as (client, _):
        whole = await client.chat.completions.create(**fields)
        assert ring.num_aborts == 1
        for choice in whole.choices:
            assert choice.finish_reason == "tool_calls"
            given = [call.function.arguments for call in choice.message.tool_calls or []]
            assert given == ['{"sides": 6}', '{"sides": 8}']
        assert whole.usage is not None
        # A token for each character, up to the bracket that completes the repeated arguments.
        num_tokens = len(text) - len("}\n</tool_call>")
        assert whole.usage.completion_tokens == num_choices * num_tokens
        names: dict[int, list[str]] = {}
        reasons = {}
        async for part in await client.chat.completions.create(**fields, stream=True):
            for of in part.choices:
                if of.finish_reason:
                    reasons[of.index] = of.finish_reason
                for call in of.delta.tool_calls or []:
                    names.setdefault(of.index, []).append(call.function.name or "")
        assert reasons == dict.fromkeys(range(num_choices), "tool_calls")
        assert all("".join(each) == "rollroll" for each in names.values())
        assert len(names) == num_choices


async def test_the_responses_api_ends_at_a_repeat() -> None:
    ring = LoopingRing([*f"{FIRST}\n{FIRST}\n{FIRST}"])
    tools: Any = [{"type": "function", **ROLL}]
    async with openai_before(ring) as (client, _):
        fields: Any = {"model": "tiny", "input": "Go", "tools": tools, "tool_choice": "required"}
        whole = await client.responses.create(**fields, store=False)
        assert whole.status == "completed"
        assert [item.type for item in whole.output] == ["function_call"]
        stream = await client.responses.create(**fields, store=False, stream=True)
        ends = [e async for e in stream if e.type == "response.output_item.done"]
        assert len(ends) == 1
        assert ring.num_aborts == 2


@pytest.mark.parametrize("parameters", [
    None, {}, {"type": "object", "properties": {}},
    {"type": "object", "properties": {}, "required": [], "additionalProperties": False},
])  # fmt: skip
@pytest.mark.parametrize("name", MARKS)
def test_a_forced_function_without_parameters_gets_none(
    llama_dir: Any, name: str, parameters: Any
) -> None:
    vocabulary: LLTokenizer = tiny_vocabulary(llama_dir, 540)
    call = chat_call(tools=[Tool(FunctionSchema("time", parameters=parameters))])
    grammar, marks = forced_calls(call, MARKS[name])
    assert marks == MARKS[name]
    obeys = Obeys(vocabulary, grammar)
    assert obeys(written(name, [TIME]))
    assert not obeys(written(name, [("time", {"x": 1})]))


@pytest.mark.parametrize("name", MARKS)
def test_a_forced_function_with_free_parameters_may_get_some(llama_dir: Any, name: str) -> None:
    vocabulary: LLTokenizer = tiny_vocabulary(llama_dir, 540)
    parameters: Any = {"type": "object", "additionalProperties": True}
    call = chat_call(tools=[Tool(FunctionSchema("time", parameters=parameters))])
    grammar, marks = forced_calls(call, MARKS[name])
    assert marks == MARKS[name]
    assert Obeys(vocabulary, grammar)(written(name, [("time", {"x": 1})]))
