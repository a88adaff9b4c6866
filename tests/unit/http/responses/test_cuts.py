"""The output of a response is the same however the answer is cut into chunks."""

import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from http_proc.answer.events import ReasoningTokens
from http_proc.answer.parser import ToolSchemas, make_parser
from http_proc.apis.responses.input import NamedTool
from http_proc.apis.responses.output import ResponseOutput
from quadriga.server.answer_format import AnswerFormat, ReasoningFormat
from tests.unit.scripted_ring import HERMES

FORMAT = AnswerFormat(calls=HERMES, reasoning=ReasoningFormat())
TOOLS = ToolSchemas({"weather": {}, "apply_patch": {}})
VALUES: Any = st.text(max_size=12)


def call_of(name: str, arguments: Any) -> str:
    call = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{call}\n</tool_call>"


PARTS = st.one_of(
    st.text(alphabet="ab <>/\n", max_size=8),
    VALUES.map(lambda text: call_of("weather", {"city": text})),
    VALUES.map(lambda text: call_of("apply_patch", {"input": text})),
    VALUES.map(lambda text: call_of("apply_patch", {"patch": text})),
)


def output_of(pieces: list[str]) -> tuple[list[Any], int]:
    """Return the items of an answer, and the number of pieces that were reasoning."""
    parser = make_parser(FORMAT, tools=TOOLS)
    output, reasoning = (
        ResponseOutput("resp_1", {"apply_patch": NamedTool("apply_patch", is_custom=True)}),
        ReasoningTokens(),
    )
    events: list[Any] = []
    for piece in pieces:
        parsed = parser.push(piece)
        reasoning.push(parsed, 1)
        events += output.push(parsed, None)
    events += output.push(parser.finish(), None)
    events += output.finish(is_cut=False)
    assert accumulated(events) == output.items
    for item in output.items:
        item.pop("id")
        item.pop("call_id", None)
    return output.items, reasoning.count


def accumulated(events: list[Any]) -> list[Any]:
    """Return the items that a client makes of the deltas alone."""
    items: list[Any] = []
    for event in events:
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            items.append(event["item"])
        elif kind == "content_part.added":
            items[event["output_index"]]["content"].append(dict(event["part"]))
        elif kind in ("output_text.delta", "reasoning_text.delta"):
            items[event["output_index"]]["content"][0]["text"] += event["delta"]
        elif kind == "function_call_arguments.delta":
            items[event["output_index"]]["arguments"] += event["delta"]
        elif kind == "custom_tool_call_input.delta":
            items[event["output_index"]]["input"] += event["delta"]
        elif kind == "output_item.done":
            items[event["output_index"]]["status"] = event["item"]["status"]
    return items


@settings(deadline=None)
@given(st.booleans(), st.lists(PARTS, max_size=5), st.data())
def test_items_and_their_deltas_do_not_depend_on_the_chunks(
    reasons: bool, parts: list[str], data: st.DataObject
) -> None:
    text = ("<think>\nHm.\n</think>\n\n" if reasons else "") + "".join(parts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole, _ = output_of([text])
    assert output_of(pieces)[0] == whole
    by_character, num_reasoning = output_of(list(text))
    assert by_character == whole
    assert (num_reasoning > 0) == (whole[0]["type"] == "reasoning")


def test_the_tokens_of_a_chunk_in_which_the_reasoning_ends_are_reasoning() -> None:
    assert output_of(["<think>", "Hm.", "</think>", "No"])[1] == 3
    assert output_of(["<think>", "Hm.</think>No", " rain"])[1] == 2
    assert output_of(["No", " <rain>"])[1] == 0
