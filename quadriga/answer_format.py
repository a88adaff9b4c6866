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

    Whitespace at the ends of a mark and within it may be missing in an answer.

    Attributes:
        open: begins the calls. Empty, if `call_open` and `name_open` are empty, too: an answer that
            begins with a call of a tool of the request consists of calls.
        open_variants: other marks that some answers have instead of `open`.
        close: ends the calls.
        close_variants: other marks that some answers have instead of `close`.
        call_open: begins each call, after `open`.
        call_close: ends each call.
        separator: stands between two calls.
        is_list: JSON: the calls are the items of a JSON list.
        name_key: JSON: key of the name. Empty: the name is the key of the arguments.
        arguments_key: JSON: key of the arguments.
        name_open: stands before the name, if the style is not JSON.
        name_close: stands between the name and the arguments, if the style is not JSON.
        index_open: NAMED_JSON: stands between the name and the number of the call, after which
            `name_close` follows. The id of the call is `name_open`, name, `index_open` and number.
        id_open: NAMED_JSON: stands between the name and the id of the call that the model writes.
        key_open: TAGGED: stands before the name of an argument.
        key_close: TAGGED: stands between the name and the value of an argument. If it ends with a
            newline, a newline before the value is not part of the value.
        string_key_close: TAGGED: the same for an argument that is a string, if that is written
            differently.
        value_close: TAGGED: stands after the value of an argument. If it begins with a newline, a
            newline after the value is not part of the value.
        quote: QUOTED: stands before and after a string.
    """

    style: CallStyle
    open: str = ""
    open_variants: tuple[str, ...] = ()
    close: str = ""
    close_variants: tuple[str, ...] = ()
    call_open: str = ""
    call_close: str = ""
    separator: str = ""
    is_list: bool = False
    name_key: str = "name"
    arguments_key: str = "arguments"
    name_open: str = ""
    name_close: str = ""
    index_open: str = ""
    id_open: str = ""
    key_open: str = ""
    key_close: str = ""
    string_key_close: str = ""
    value_close: str = ""
    quote: str = ""


class ReasoningFormat(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The marks around the reasoning.

    Attributes:
        open: begins the reasoning, in the answer or at the end of the prompt.
        open_variants: other marks that some answers have instead of `open`.
        close: ends it; what follows is the answer proper.
        close_variants: other marks that some answers have instead of `close`.
        text_open: begins the answer proper, if that has a mark of its own; dropped.
        text_close: ends the answer proper; dropped.
        switch: variable of the chat template that turns reasoning on and off; empty if it has none.
        is_default: the model reasons unless the switch is off.
    """

    open: str = "<think>"
    open_variants: tuple[str, ...] = ()
    close: str = "</think>"
    close_variants: tuple[str, ...] = ()
    text_open: str = ""
    text_close: str = ""
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


def ends_inside(text: str, open_mark: str, close_mark: str) -> bool:
    """Return whether a text ends between the marks: the last mark in it is the one that opens."""
    return text.rfind(open_mark) > text.rfind(close_mark)


def to_info(answer_format: AnswerFormat) -> dict[str, object]:
    """Return the format as a value of Info."""
    values: dict[str, object] = msgspec.to_builtins(answer_format)
    return values


def from_info(values: object) -> AnswerFormat:
    """Return the format of a value of Info."""
    return msgspec.convert(values, AnswerFormat)
