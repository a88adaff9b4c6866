"""The time to parse an answer grows with its length, also character by character."""

import json
import time

import pytest

from http_proc.answer.parser import make_parser
from quadriga.server.answer_format import KNOWN_FORMATS
from tests.unit.http.answer.recorded import TOOLS, hermes

LENGTH = 100_000
# Some microseconds for a character; a scan of the answer for each would take minutes.
MAX_SECONDS = 15.0

ARGUMENTS = json.dumps({"code": 'a "b" < \\ \n' * (LENGTH // 12)})
ANSWERS = {
    "text": ("qwen3", "a < b <tool_call " * (LENGTH // 17)),
    "reasoning": ("qwen3", "<think>" + "a\n\n </thin" * (LENGTH // 10)),
    "newlines": ("qwen3", "<think>a" + "\n" * LENGTH),
    "spaces": ("hermes", hermes("time", "{}") + " " * LENGTH),
    "marks": ("hermes", "<tool_call>" * (LENGTH // 11)),
    "objects": ("hermes", '<tool_call>{"a":' * (LENGTH // 16)),
    "arguments": ("hermes", hermes("run", ARGUMENTS)),
    "unwrapped": ("hermes", hermes("run", json.dumps(ARGUMENTS))),
    "before the name": ("hermes", f'<tool_call>{{"arguments": {ARGUMENTS}, "name": "run"}}'),
    "no name": ("hermes", f'<tool_call>{{"arguments": {ARGUMENTS}}}</tool_call>'),
    "deep": ("mistral", "[TOOL_CALLS]run[ARGS]" + '{"a":[' * (LENGTH // 6)),
    "many calls": ("mistral", "[TOOL_CALLS]time{}" * (LENGTH // 18)),
    "number": ("mistral", '[TOOL_CALLS]run{"a":' + "1" * LENGTH),
    "string": ("qwen3_coder", "<function=run><parameter=code>" + "a\n</par" * (LENGTH // 7)),
    "held value": ("qwen3_coder", "<function=weather><parameter=tags>" + "[1," * (LENGTH // 3)),
    "no end of call": ("qwen3_coder", "<function=time></parameter>" + "a</func" * (LENGTH // 7)),
    "python": ("pythonic", "[weather(city='" + "a\\'\"" * (LENGTH // 4)),
    "quoted": ("gemma4", '<|tool_call>call:run{code:<|"|>' + 'a<|"' * (LENGTH // 4)),
    "header": ("harmony", "<|start|>" + "to=functions." * (LENGTH // 13)),
    "messages": ("harmony", "<|start|><|channel|>final<|message|>a<|end|>" * (LENGTH // 44)),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_is_parsed_in_a_time_that_grows_with_its_length(name: str) -> None:
    source, text = ANSWERS[name]
    start = time.monotonic()
    for pieces in ([text], text):
        parser = make_parser(KNOWN_FORMATS[source], tools=TOOLS)
        for piece in pieces:
            parser.push(piece)
        parser.finish()
    assert time.monotonic() - start < MAX_SECONDS
