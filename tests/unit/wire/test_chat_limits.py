"""The bounds of a chat, alike for the ring's messages and the web's."""

import pytest

from quadriga.errors import InvalidRequest
from quadriga.wire.client import (
    MAX_NAME_CHARS,
    MAX_ROLE_CHARS,
    MAX_TEMPLATE_ARGS,
    MAX_TOOL_CALLS,
    MAX_TOOLS,
    MAX_TURNS,
    ChatMessage,
    ChatOptions,
    check_chat,
    check_chat_options,
)

TURN = ChatMessage("user", "x" * 100_000)
AT_THE_BOUNDS = [
    [TURN] * MAX_TURNS,
    [ChatMessage("r" * MAX_ROLE_CHARS, "")],
    [ChatMessage("tool", "", name="n" * MAX_NAME_CHARS, tool_call_id="i" * MAX_NAME_CHARS)],
    [ChatMessage("assistant", "", tool_calls=[{}] * (MAX_TOOL_CALLS // 2))] * 2,
]
OVER_THEM = [
    ([], "has no turns"),
    ([TURN] * (MAX_TURNS + 1), f"{MAX_TURNS + 1} turns: at most {MAX_TURNS}"),
    ([TURN, ChatMessage("r" * (MAX_ROLE_CHARS + 1), "")], "a role of 65 characters in turn 1"),
    ([ChatMessage("tool", "", name="n" * (MAX_NAME_CHARS + 1))], "a name of 257 characters"),
    ([ChatMessage("tool", "", tool_call_id="i" * 1000)], "a tool_call_id of 1000 characters"),
    (
        [ChatMessage("assistant", "", tool_calls=[{}] * MAX_TOOL_CALLS)] * 2,
        f"{2 * MAX_TOOL_CALLS} tool calls",
    ),
]


@pytest.mark.parametrize("messages", AT_THE_BOUNDS, ids=range(len(AT_THE_BOUNDS)))
def test_a_chat_at_its_bounds_is_taken(messages: list[ChatMessage]) -> None:
    check_chat(messages)


@pytest.mark.parametrize(("messages", "said"), OVER_THEM, ids=[said for _, said in OVER_THEM])
def test_a_chat_over_a_bound_is_refused_with_the_value_and_the_limit(
    messages: list[ChatMessage], said: str
) -> None:
    with pytest.raises(InvalidRequest, match=said) as caught:
        check_chat(messages)
    assert caught.value.field == "prompt"


def test_tools_and_variables_of_a_template_have_bounds() -> None:
    names = [str(number) for number in range(MAX_TEMPLATE_ARGS + 1)]
    check_chat_options(ChatOptions([{}] * MAX_TOOLS, dict.fromkeys(names[1:])))
    for options, field in (
        (ChatOptions([{}] * (MAX_TOOLS + 1)), "tools"),
        (ChatOptions([], dict.fromkeys(names)), "template_args"),
        (ChatOptions([], {"n" * (MAX_NAME_CHARS + 1): 1}), "template_args"),
    ):
        with pytest.raises(InvalidRequest, match="at most") as caught:
            check_chat_options(options)
        assert caught.value.field == field
