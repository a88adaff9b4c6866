"""The time to parse an answer grows with its length, also character by character."""

import json
import time

import pytest

from http_proc.answer.parser import make_parser
from quadriga.server.answer_format import KNOWN_FORMATS
from tests.unit.http.answer.recorded import TOOLS, hermes

SHORT, LONG = 10_000, 40_000
# In proportion to the lengths it would be 4, in proportion to their squares 16.
MAX_RATIO = 8


def answers(length: int) -> dict[str, tuple[str, str]]:
    """Return (source of the format, text) of answers of about so many characters."""
    arguments = json.dumps({"code": 'a "b" < \\ \n' * (length // 12)})
    return {
        "text": ("qwen3", "a < b <tool_call " * (length // 17)),
        "reasoning": ("qwen3", "<think>" + "a\n\n </thin" * (length // 10)),
        "newlines": ("qwen3", "<think>a" + "\n" * length),
        "spaces": ("hermes", hermes("time", "{}") + " " * length),
        "marks": ("hermes", "<tool_call>" * (length // 11)),
        "objects": ("hermes", '<tool_call>{"a":' * (length // 16)),
        "arguments": ("hermes", hermes("run", arguments)),
        "unwrapped": ("hermes", hermes("run", json.dumps(arguments))),
        "before the name": ("hermes", f'<tool_call>{{"arguments": {arguments}, "name": "run"}}'),
        "no name": ("hermes", f'<tool_call>{{"arguments": {arguments}}}</tool_call>'),
        "deep": ("mistral", "[TOOL_CALLS]run[ARGS]" + '{"a":[' * (length // 6)),
        "many calls": ("mistral", "[TOOL_CALLS]time{}" * (length // 18)),
        "number": ("mistral", '[TOOL_CALLS]run{"a":' + "1" * length),
        "string": ("qwen3_coder", "<function=run><parameter=code>" + "a\n</par" * (length // 7)),
        "held value": ("qwen3_coder", "<function=weather><parameter=tags>" + "[1," * (length // 3)),
        "no end of call": (
            "qwen3_coder",
            "<function=time></parameter>" + "a</func" * (length // 7),
        ),
        "python": ("pythonic", "[weather(city='" + "a\\'\"" * (length // 4)),
        "quoted": ("gemma4", '<|tool_call>call:run{code:<|"|>' + 'a<|"' * (length // 4)),
        "header": ("harmony", "<|start|>" + "to=functions." * (length // 13)),
        "lines": ("hermes", "a\n``" * (length // 4)),
        "block": ("hermes", "```json\n[" + '{"name": "time", "arguments": {}}, ' * (length // 36)),
        "blocks": ("hermes", '```json\n{"name": "time", "arguments": {}}\n```\n' * (length // 47)),
        "tags": ("hermes", '<tools>{"name": "time", "arguments": {"' * (length // 38)),
        "whole answer": ("mistral", f'{{"arguments": {arguments}, "name": "run"}} x'),
        "messages": ("harmony", "<|start|><|channel|>final<|message|>a<|end|>" * (length // 44)),
    }


ANSWERS = {length: answers(length) for length in (SHORT, LONG)}


def seconds_to_parse(source: str, text: str) -> float:
    """Return the CPU time of this thread to parse a text at once, and character by character."""
    began_at = time.thread_time()
    for pieces in ([text], text):
        parser = make_parser(KNOWN_FORMATS[source], tools=TOOLS, takes_unmarked=True)
        for piece in pieces:
            parser.push(piece)
        parser.finish()
    return time.thread_time() - began_at


@pytest.mark.parametrize("name", ANSWERS[SHORT])
def test_an_answer_is_parsed_in_a_time_that_grows_with_its_length(name: str) -> None:
    seconds_to_parse(*ANSWERS[SHORT][name])  # tables that are made once
    short = seconds_to_parse(*ANSWERS[SHORT][name])
    assert seconds_to_parse(*ANSWERS[LONG][name]) <= MAX_RATIO * short
