"""How a model marks the parts of its answers: reasoning, text and tool calls.

The tokenizer process derives the format from the chat template and publishes it in the server's
info; the gateway parses answers with it. First the description of a format, then the formats of
known model families by name.
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
        QUOTED: the name and an object whose keys are bare and whose strings are between marks:
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
        separator: text between two calls.
        is_list: JSON: the calls are the items of a JSON list.
        name_key: JSON: key of the name. Empty: the name is the key of the arguments.
        arguments_key: JSON: key of the arguments.
        name_open: text before the name, if the style is not JSON.
        name_close: text between the name and the arguments, if the style is not JSON.
        index_open: NAMED_JSON: text between the name and the number of the call, after which
            `name_close` follows. The id of the call is `name_open`, name, `index_open` and number.
        id_open: NAMED_JSON: text between the name and the id of the call that the model writes.
        key_open: TAGGED: text before the name of an argument.
        key_close: TAGGED: text between the name and the value of an argument. If it ends with a
            newline, a newline before the value is not part of the value.
        string_key_close: TAGGED: the same for an argument that is a string, if that is written
            differently.
        value_close: TAGGED: text after the value of an argument. If it begins with a newline, a
            newline after the value is not part of the value.
        quote: QUOTED: text before and after a string.
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
        takes_unmarked: plain JSON is a call, too, where it has the name of a tool and arguments.
    """

    source: str = ""
    calls: CallFormat | None = None
    reasoning: ReasoningFormat | None = None
    takes_tools: bool = False
    has_special_marks: bool = False
    takes_unmarked: bool = True


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


# The names of these formats are the values of --tool-call-parser, which takes the calls of a
# format, and of --reasoning-parser, which takes its reasoning.

_THINK = ReasoningFormat()

# Qwen 2.5, Qwen 3, Granite 4, Hermes.
_HERMES = CallFormat(
    style=CallStyle.JSON, call_open="<tool_call>\n", call_close="\n</tool_call>", separator="\n"
)

# Qwen3-Coder, Qwen 3.5, Nemotron 3, Step 3.5.
_QWEN3_CODER = CallFormat(
    style=CallStyle.TAGGED,
    open="<tool_call>\n",
    close="\n</tool_call>",
    call_close="</function>",
    name_open="<function=",
    name_close=">\n",
    key_open="<parameter=",
    key_close=">\n",
    value_close="\n</parameter>",
)

# An older model writes a list of objects after the mark, which the style accepts, too.
_MISTRAL = CallFormat(
    style=CallStyle.NAMED_JSON, open="[TOOL_CALLS]", name_close="[ARGS]", id_open="[CALL_ID]"
)

_LLAMA3_JSON = CallFormat(
    style=CallStyle.JSON,
    open_variants=("<|python_tag|>",),
    separator=";",
    arguments_key="parameters",
)

# Llama 3.2 and Llama 4.
_PYTHONIC = CallFormat(
    style=CallStyle.PYTHONIC,
    open_variants=("<|python_start|>", "<|python_tag|>"),
    close_variants=("<|python_end|>",),
)

_LFM2 = CallFormat(style=CallStyle.PYTHONIC, open="<|tool_call_start|>", close="<|tool_call_end|>")

# gpt-oss.
_HARMONY = CallFormat(
    style=CallStyle.HARMONY,
    open="<|channel|>commentary to=functions.",
    name_close=" <|constrain|>json<|message|>",
    call_close="<|call|>",
)

_DEEPSEEK_V3 = CallFormat(
    style=CallStyle.NAMED_JSON,
    open="<｜tool▁calls▁begin｜>",
    close="<｜tool▁calls▁end｜>",
    call_open="<｜tool▁call▁begin｜>",
    call_close="\n```<｜tool▁call▁end｜>",
    separator="\n",
    name_open="function<｜tool▁sep｜>",
    name_close="\n```json\n",
)

_DEEPSEEK_V31 = CallFormat(
    style=CallStyle.NAMED_JSON,
    open="<｜tool▁calls▁begin｜>",
    close="<｜tool▁calls▁end｜>",
    call_open="<｜tool▁call▁begin｜>",
    call_close="<｜tool▁call▁end｜>",
    name_close="<｜tool▁sep｜>",
)

_DEEPSEEK_V32 = CallFormat(
    style=CallStyle.TAGGED,
    open="<｜DSML｜function_calls>\n",
    close="</｜DSML｜function_calls>",
    call_close="</｜DSML｜invoke>\n",
    name_open='<｜DSML｜invoke name="',
    name_close='">\n',
    key_open='<｜DSML｜parameter name="',
    key_close='" string="false">',
    string_key_close='" string="true">',
    value_close="</｜DSML｜parameter>\n",
)

_GLM45 = CallFormat(
    style=CallStyle.TAGGED,
    open="<tool_call>",
    close="</tool_call>",
    name_close="\n",
    key_open="<arg_key>",
    key_close="</arg_key>\n<arg_value>",
    value_close="</arg_value>\n",
)

_FUNCTION_GEMMA = CallFormat(
    style=CallStyle.QUOTED,
    open="<start_function_call>",
    close="<end_function_call>",
    name_open="call:",
    quote="<escape>",
)

_GEMMA4 = CallFormat(
    style=CallStyle.QUOTED,
    open="<|tool_call>",
    close="<tool_call|>",
    name_open="call:",
    quote='<|"|>',
)

# Granite 3; Granite 4 is hermes.
_GRANITE = CallFormat(
    style=CallStyle.JSON, open="<|tool_call|>", open_variants=("<tool_call>",), is_list=True
)

_PHI4 = CallFormat(
    style=CallStyle.JSON,
    open="<|tool_call|>",
    open_variants=("functools",),
    close="<|/tool_call|>",
    is_list=True,
)

_KIMI_K2 = CallFormat(
    style=CallStyle.NAMED_JSON,
    open="<|tool_calls_section_begin|>",
    close="<|tool_calls_section_end|>",
    call_open="<|tool_call_begin|>",
    call_close="<|tool_call_end|>",
    name_open="functions.",
    name_close="<|tool_call_argument_begin|>",
    index_open=":",
)

_MINIMAX_M2 = CallFormat(
    style=CallStyle.TAGGED,
    open="<minimax:tool_call>\n",
    close="</minimax:tool_call>",
    call_close="</invoke>\n",
    name_open='<invoke name="',
    name_close='">\n',
    key_open='<parameter name="',
    key_close='">',
    value_close="</parameter>\n",
)

_SEED_OSS = CallFormat(
    style=CallStyle.TAGGED,
    open="<seed:tool_call>\n",
    close="\n</seed:tool_call>",
    call_close="</function>",
    name_open="<function=",
    name_close=">\n",
    key_open="<parameter=",
    key_close=">",
    value_close="</parameter>\n",
)

_NEMOTRON = CallFormat(style=CallStyle.JSON, open="<TOOLCALL>", close="</TOOLCALL>", is_list=True)

_COMMAND_R7B = CallFormat(
    style=CallStyle.JSON,
    open="<|START_ACTION|>",
    close="<|END_ACTION|>",
    is_list=True,
    name_key="tool_name",
    arguments_key="parameters",
)

_APERTUS = CallFormat(
    style=CallStyle.JSON,
    open="<|tools_prefix|>",
    close="<|tools_suffix|>",
    is_list=True,
    name_key="",
)

KNOWN_FORMATS: dict[str, AnswerFormat] = {
    answer_format.source: answer_format
    for answer_format in (
        AnswerFormat(source="hermes", calls=_HERMES),
        AnswerFormat(source="qwen3_coder", calls=_QWEN3_CODER),
        AnswerFormat(
            source="mistral",
            calls=_MISTRAL,
            reasoning=ReasoningFormat(open="[THINK]", close="[/THINK]"),
            has_special_marks=True,
        ),
        AnswerFormat(source="llama3_json", calls=_LLAMA3_JSON, has_special_marks=True),
        AnswerFormat(source="pythonic", calls=_PYTHONIC, has_special_marks=True),
        AnswerFormat(source="lfm2", calls=_LFM2, reasoning=_THINK, has_special_marks=True),
        AnswerFormat(
            source="harmony",
            calls=_HARMONY,
            reasoning=ReasoningFormat(open="<|channel|>analysis<|message|>", close="<|end|>"),
            has_special_marks=True,
        ),
        AnswerFormat(source="deepseek_v3", calls=_DEEPSEEK_V3, has_special_marks=True),
        AnswerFormat(
            source="deepseek_r1", calls=_DEEPSEEK_V3, reasoning=_THINK, has_special_marks=True
        ),
        AnswerFormat(
            source="deepseek_v31",
            calls=_DEEPSEEK_V31,
            reasoning=ReasoningFormat(switch="thinking", is_default=False),
            has_special_marks=True,
        ),
        AnswerFormat(
            source="deepseek_v32",
            calls=_DEEPSEEK_V32,
            reasoning=ReasoningFormat(switch="thinking", is_default=False),
            has_special_marks=True,
        ),
        AnswerFormat(
            source="glm45",
            calls=_GLM45,
            reasoning=ReasoningFormat(switch="enable_thinking"),
            has_special_marks=True,
        ),
        AnswerFormat(source="functiongemma", calls=_FUNCTION_GEMMA, has_special_marks=True),
        AnswerFormat(
            source="gemma4",
            calls=_GEMMA4,
            reasoning=ReasoningFormat(
                open="<|channel>thought",
                close="<channel|>",
                switch="enable_thinking",
                is_default=False,
            ),
            has_special_marks=True,
        ),
        AnswerFormat(
            source="granite",
            calls=_GRANITE,
            reasoning=ReasoningFormat(
                open_variants=("Here is my thought process:", "Here's my thought process:"),
                close_variants=("Here is my response:", "Here's my response:"),
                text_open="<response>",
                text_close="</response>",
                switch="thinking",
                is_default=False,
            ),
            has_special_marks=True,
        ),
        AnswerFormat(source="phi4", calls=_PHI4, has_special_marks=True),
        AnswerFormat(source="kimi_k2", calls=_KIMI_K2, reasoning=_THINK, has_special_marks=True),
        AnswerFormat(
            source="minimax_m2", calls=_MINIMAX_M2, reasoning=_THINK, has_special_marks=True
        ),
        AnswerFormat(
            source="seed_oss",
            calls=_SEED_OSS,
            reasoning=ReasoningFormat(open="<seed:think>", close="</seed:think>"),
            has_special_marks=True,
        ),
        AnswerFormat(source="nemotron", calls=_NEMOTRON, reasoning=_THINK),
        AnswerFormat(
            source="command_r7b",
            calls=_COMMAND_R7B,
            reasoning=ReasoningFormat(
                open="<|START_THINKING|>",
                close="<|END_THINKING|>",
                text_open="<|START_RESPONSE|>",
                text_close="<|END_RESPONSE|>",
                switch="enable_thinking",
            ),
            has_special_marks=True,
        ),
        AnswerFormat(
            source="apertus",
            calls=_APERTUS,
            reasoning=ReasoningFormat(open="<|inner_prefix|>", close="<|inner_suffix|>"),
            has_special_marks=True,
        ),
        AnswerFormat(source="think", reasoning=_THINK),
        AnswerFormat(
            source="qwen3", calls=_HERMES, reasoning=ReasoningFormat(switch="enable_thinking")
        ),
    )
}
