"""How a model marks the parts of its answers: reasoning, text and tool calls.

The tokenizer process derives the format from the chat template and publishes it in the server's
info; the gateway parses answers with it.
"""

from enum import Enum

import msgspec


class CallStyle(Enum):
    """How one tool call is written.

    Attributes:
        JSON: an object with the name and the arguments: {"name": "f", "arguments": {"a": 1}}.
        NAMED_JSON: the name, a mark, and the arguments as an object: f[ARGS]{"a": 1}.
        TAGGED: the name, then each argument between marks: <function=f><parameter=a>1</parameter>.
        PYTHONIC: a list of Python calls: [f(a=1), g()].
        QUOTED: the name and an object whose keys are bare and whose strings stand between marks:
            f{a:1,b:<|"|>x<|"|>}.
        HARMONY: messages to channels, as gpt-oss writes them; the reasoning is one of the channels.
    """

    JSON = "json"
    NAMED_JSON = "named_json"
    TAGGED = "tagged"
    PYTHONIC = "pythonic"
    QUOTED = "quoted"
    HARMONY = "harmony"


class CallFormat(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The marks around tool calls. An empty mark is not written.

    Attributes:
        open: begins the calls. Empty: an answer that begins with a call consists of calls.
        close: ends the calls.
        call_open: begins each call, after `open`.
        call_close: ends each call.
        separator: stands between two calls.
        is_list: JSON: the calls are the items of a JSON list.
        name_key: JSON: key of the name.
        arguments_key: JSON: key of the arguments.
        name_open: stands before the name, if the style is not JSON.
        name_close: stands between the name and the arguments, if the style is not JSON.
        key_open: TAGGED: stands before the name of an argument.
        key_close: TAGGED: stands between the name and the value of an argument.
        value_close: TAGGED: stands after the value of an argument.
        quote: QUOTED: stands before and after a string.
    """

    style: CallStyle
    open: str = ""
    close: str = ""
    call_open: str = ""
    call_close: str = ""
    separator: str = ""
    is_list: bool = False
    name_key: str = "name"
    arguments_key: str = "arguments"
    name_open: str = ""
    name_close: str = ""
    key_open: str = ""
    key_close: str = ""
    value_close: str = ""
    quote: str = ""


class ReasoningFormat(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The marks around the reasoning.

    Attributes:
        open: begins the reasoning, in the answer or at the end of the prompt.
        close: ends it; what follows is the answer proper.
        switch: variable of the chat template that turns reasoning on and off; empty if it has none.
        is_default: the model reasons unless the switch is off.
    """

    open: str = "<think>"
    close: str = "</think>"
    switch: str = ""
    is_default: bool = True


class AnswerFormat(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How a model writes its answers.

    Attributes:
        source: where it comes from, for the log: the name of a known format, or "derived from the
            chat template".
        calls: marks of tool calls; None: answers have no calls.
        reasoning: marks of the reasoning; None: answers have none.
        takes_tools: the chat template renders tools. Otherwise the generic form of tools is put
            into the system message.
        has_special_marks: a mark is a special token, which the text must keep to be parsed.
    """

    source: str = ""
    calls: CallFormat | None = None
    reasoning: ReasoningFormat | None = None
    takes_tools: bool = False
    has_special_marks: bool = False


def to_info(answer_format: AnswerFormat) -> dict[str, object]:
    """Return the format as a value of Info."""
    values: dict[str, object] = msgspec.to_builtins(answer_format)
    return values


def from_info(values: object) -> AnswerFormat:
    """Return the format of a value of Info."""
    return msgspec.convert(values, AnswerFormat)
