"""The formats of answers of known model families, by name.

The names are the values of --tool-call-parser, which takes the calls of a format, and of
--reasoning-parser, which takes its reasoning.
"""

from quadriga.answer_format import AnswerFormat, CallFormat, CallStyle, ReasoningFormat

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
    style=CallStyle.NAMED_JSON,
    open="[TOOL_CALLS]",
    name_close="[ARGS]",
    id_open="[CALL_ID]",
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
