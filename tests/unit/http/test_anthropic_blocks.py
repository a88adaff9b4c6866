"""Content blocks: the steps of a stream, and the same blocks as a whole."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from http_proc.answer.events import (
    AnswerEvent,
    ArgumentsDelta,
    CallBegin,
    CallEnd,
    ReasoningDelta,
    TextDelta,
)
from http_proc.apis.anthropic import (
    BlockDelta,
    BlockStart,
    BlockStep,
    BlockStop,
    BlockWriter,
    OutputBlock,
    TextBlock,
    ThinkingBlock,
    ThinkingDisplay,
    ToolUseBlock,
    complete_object,
    whole_blocks,
)

SHOWN, WITHOUT_TEXT = ThinkingDisplay(True, True), ThinkingDisplay(True, False)
HIDDEN = ThinkingDisplay(False, False)


def steps_of(events: list[AnswerEvent], display: ThinkingDisplay = SHOWN) -> list[BlockStep]:
    writer = BlockWriter(display)
    steps = [step for event in events for step in writer.push([event])]
    return steps + writer.finish()


def blocks_of(events: list[AnswerEvent], display: ThinkingDisplay = SHOWN) -> list[OutputBlock]:
    return whole_blocks(steps_of(events, display))


def call(arguments: str, *rest: AnswerEvent) -> list[AnswerEvent]:
    return [CallBegin("c1", "f"), ArgumentsDelta(arguments), *rest]


def test_parts_become_blocks_in_the_order_in_which_they_were_written() -> None:
    events = [
        ReasoningDelta("Hm"),
        ReasoningDelta("."),
        TextDelta("\n\n"),
        TextDelta("Let "),
        TextDelta("me."),
        TextDelta("\n"),
        *call('{"a": 1}', CallEnd()),
        TextDelta(" Done"),
    ]
    thinking, text, use, last = blocks_of(events)
    assert isinstance(thinking, ThinkingBlock) and thinking.thinking == "Hm."
    assert text == TextBlock("\n\nLet me.\n")
    assert use == ToolUseBlock("c1", "f", {"a": 1})
    assert last == TextBlock(" Done")


def test_white_space_alone_is_no_block() -> None:
    events = [ReasoningDelta("\n\n"), TextDelta("\n"), *call("{}", CallEnd()), TextDelta("\n")]
    assert blocks_of(events) == [ToolUseBlock("c1", "f", {})]


def test_the_signature_is_that_of_the_text_and_comes_before_the_end() -> None:
    cut_one_way = steps_of([ReasoningDelta("Hm."), TextDelta("Yes")])
    cut_another = steps_of([ReasoningDelta("H"), ReasoningDelta("m."), TextDelta("Yes")])
    signatures = [step.delta for step in cut_one_way if isinstance(step, BlockDelta)][1]
    assert signatures in [step.delta for step in cut_another if isinstance(step, BlockDelta)]
    assert isinstance(cut_one_way[3], BlockStop)
    assert whole_blocks(cut_one_way) == whole_blocks(cut_another)


def test_omitted_thinking_has_a_signature_and_no_text() -> None:
    shown = blocks_of([ReasoningDelta("Hm."), TextDelta("Yes")])[0]
    omitted, text = blocks_of([ReasoningDelta("Hm."), TextDelta("Yes")], WITHOUT_TEXT)
    assert isinstance(shown, ThinkingBlock)
    assert omitted == ThinkingBlock("", shown.signature)
    assert text == TextBlock("Yes")


def test_disabled_thinking_has_no_block() -> None:
    assert blocks_of([ReasoningDelta("Hm."), TextDelta("Yes")], HIDDEN) == [TextBlock("Yes")]


@given(st.lists(st.sampled_from([
    TextDelta("a"), TextDelta(" "), TextDelta("\n"), ReasoningDelta("b"), ReasoningDelta(" "),
    CallBegin("i", "f"), ArgumentsDelta("{"), ArgumentsDelta("}"), CallEnd(),
])))  # fmt: skip
def test_blocks_never_interleave_and_are_numbered_in_order(events: list[AnswerEvent]) -> None:
    is_open, num_blocks, in_call = False, 0, False
    valid: list[AnswerEvent] = []
    for event in events:
        if isinstance(event, ArgumentsDelta | CallEnd) != in_call:
            continue  # the parser sends nothing else inside of a call, and those only there
        in_call = isinstance(event, CallBegin | ArgumentsDelta)
        valid.append(event)
    for step in steps_of(valid):
        if isinstance(step, BlockStart):
            assert not is_open
            is_open, num_blocks = True, num_blocks + 1
        assert is_open and step.index == num_blocks - 1
        if isinstance(step, BlockStop):
            is_open = False
    assert not is_open


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", {}),
        ("{", {}),
        ('{"a": 1', {}),
        ('{"a": 1,', {"a": 1}),
        ('{"a": "x", "b": "cut', {"a": "x"}),
        ('{"a": "x", "b": "cut\\', {"a": "x"}),
        ('{"a": "}{,", "b', {"a": "}{,"}),
        ('{"a": {"b": [1, 2', {"a": {"b": [1]}}),
        ('{"a": {"b": [1, 2]}', {"a": {"b": [1, 2]}}),
        ("}", {}),
        ("[1, 2", {}),
        ("nonsense", {}),
    ],
)
def test_a_call_that_was_cut_off_has_the_arguments_that_are_complete(
    text: str, expected: object
) -> None:
    assert complete_object(text) == expected
    assert blocks_of(call(text)) == [ToolUseBlock("c1", "f", expected)]


@given(st.recursive(st.none() | st.integers() | st.text(),
                    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)),
       st.data())  # fmt: skip
def test_every_cut_of_an_object_is_read(value: object, data: st.DataObject) -> None:
    text = json.dumps({"a": value, "b": [value]})
    cut = data.draw(st.integers(0, len(text)))
    found = complete_object(text[:cut])
    assert found.keys() <= {"a", "b"}
    assert cut < len(text) or found == json.loads(text)
