"""Answers as models of each family write them, with what they mean."""

import json
from dataclasses import dataclass
from typing import Any

from http_proc.answer.events import ParsedAnswer
from http_proc.answer.parser import ToolSchemas, make_parser
from quadriga.server.answer_format import KNOWN_FORMATS

TOOLS = ToolSchemas(
    {
        "weather": {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "integer"},
                "metric": {"type": "boolean"},
                "tags": {"$ref": "#/$defs/tags"},
                "unit": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            },
            "$defs": {"tags": {"type": "array"}},
        },
        "time": {"type": "object", "properties": {}},
        "run": {"type": "object", "properties": {"code": {"type": "string"}}},
    }
)
# Nested values, quotes, a backslash, and characters of one to four bytes.
RICH: dict[str, Any] = {
    "city": 'Zürich "東京" 🚀 C:\\x',
    "days": 3,
    "metric": True,
    "tags": [{"a": None}, "b", -1.5e3, []],
    "unit": None,
}
ROME = {"city": "Rome"}
RICH_JSON = json.dumps(RICH, ensure_ascii=False)
ROME_JSON = json.dumps(ROME)
# A string that holds a part of the marks of many formats, and newlines around it.
CODE = "\nif a < b: x['</para'] = \"<tool_\" # [TOOL_CALLS <｜tool▁ <|\n"
CODE_JSON = json.dumps({"code": CODE}, ensure_ascii=False)

Call = tuple[str, dict[str, Any]]
RICH_CALL: Call = ("weather", RICH)
ROME_CALL: Call = ("weather", ROME)
TIME_CALL: Call = ("time", {})
CODE_CALL: Call = ("run", {"code": CODE})


@dataclass(frozen=True)
class Recorded:
    """An answer and what it means.

    Attributes:
        source: name of the format.
        answer: what the model writes.
        text: the answer proper.
        reasoning: the reasoning.
        calls: names and arguments.
        begins_in_reasoning: the prompt ends within the reasoning.
    """

    source: str
    answer: str
    text: str = ""
    reasoning: str = ""
    calls: tuple[Call, ...] = ()
    begins_in_reasoning: bool = False


def parse(
    source: str, pieces: list[str], tools: ToolSchemas | None = TOOLS, **options: Any
) -> ParsedAnswer:
    """Return the parsed answer of a known format."""
    parser, answer = make_parser(KNOWN_FORMATS[source], tools=tools, **options), ParsedAnswer()
    for piece in pieces:
        answer.add(parser.push(piece))
    answer.add(parser.finish())
    return answer


def meaning(answer: ParsedAnswer) -> tuple[str, str, list[tuple[str, str, bool]]]:
    """Return an answer without the ids of its calls, which are random."""
    calls = [(call.name, call.arguments, call.is_complete) for call in answer.calls]
    return answer.reasoning, answer.text, calls


def hermes(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def kimi(number: int, name: str, arguments: str) -> str:
    return (
        f"<|tool_call_begin|>functions.{name}:{number}<|tool_call_argument_begin|>{arguments}"
        "<|tool_call_end|>"
    )


def deepseek_v3(name: str, arguments: str) -> str:
    return (
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```"
        "<｜tool▁call▁end｜>"
    )


PYTHON_RICH = (
    "weather(city='Zürich \"東京\" 🚀 C:\\\\x', days=3, metric=True,"
    " tags=[{'a': None}, \"b\", -1.5e3, []], unit=None)"
)
RICH_TAGS = json.dumps(RICH["tags"])

ANSWERS = [
    # Hermes, Qwen 2.5, Granite 4
    Recorded("hermes", hermes("weather", RICH_JSON), calls=(RICH_CALL,)),
    Recorded(
        "hermes",
        f"Let me see.\n{hermes('weather', ROME_JSON)}\n{hermes('time', '{}')}\n Done.",
        text="Let me see.\n\n Done.",
        calls=(ROME_CALL, TIME_CALL),
    ),
    Recorded("hermes", hermes("run", CODE_JSON), calls=(CODE_CALL,)),
    Recorded("hermes", f"\n\n{hermes('time', '{}')}\n", calls=(TIME_CALL,)),
    Recorded("hermes", hermes("unknown", '{"x": [1]}'), calls=(("unknown", {"x": [1]}),)),
    Recorded("hermes", hermes("weather", json.dumps(ROME_JSON)), calls=(ROME_CALL,)),
    Recorded("hermes", hermes("weather", json.dumps(RICH_JSON)), calls=(RICH_CALL,)),
    Recorded("hermes", hermes("time", "null"), calls=(TIME_CALL,)),
    Recorded("hermes", hermes("time", '""'), calls=(TIME_CALL,)),
    Recorded("hermes", '<tool_call>{"name": "time"}</tool_call>', calls=(TIME_CALL,)),
    Recorded(
        "hermes",
        f'<tool_call>{{"arguments": {RICH_JSON}, "id": [1, {{}}], "name": "weather"}}</tool_call>',
        calls=(RICH_CALL,),
    ),
    Recorded(
        "hermes",
        f'<tool_call>{{"id": 1, "name": "weather", "arguments": {ROME_JSON}, "x": "}}"}}'
        "</tool_call>",
        calls=(ROME_CALL,),
    ),
    Recorded("hermes", "<tool_call>\nno call\n</tool_call>", "<tool_call>\nno call\n</tool_call>"),
    Recorded("hermes", "a <tool_cal b < c <tool_call", "a <tool_cal b < c <tool_call"),
    Recorded("hermes", hermes("f", "[1]"), hermes("f", "[1]")),
    Recorded("hermes", hermes("f", '"[1]"'), hermes("f", '"[1]"')),
    Recorded("hermes", " \n ", " \n "),
    Recorded("hermes", ""),
    # Qwen 3
    Recorded(
        "qwen3",
        f"<think>\nI call:\n{hermes('time', '{}')}\n</think>\n\n{hermes('weather', RICH_JSON)}",
        reasoning=f"I call:\n{hermes('time', '{}')}",
        calls=(RICH_CALL,),
    ),
    Recorded("qwen3", "\n<think>\n\n</think>\n\nYes.\n", text="Yes.\n"),
    Recorded("qwen3", "No <think>x</think>", text="No <think>x</think>"),
    Recorded("qwen3", "<think>\nnever\nending </thi", reasoning="never\nending </thi"),
    Recorded("qwen3", "  ", text="  "),
    # Qwen3-Coder
    Recorded(
        "qwen3_coder",
        "I look.\n<tool_call>\n<function=weather>\n<parameter=city>\n"
        f"{RICH['city']}\n</parameter>\n<parameter=days>\n3\n</parameter>\n<parameter=metric>\n"
        f"true\n</parameter>\n<parameter=tags>\n{RICH_TAGS}\n</parameter>\n<parameter=unit>\nnull\n"
        "</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=time>\n</function>\n"
        "</tool_call>",
        text="I look.\n",
        calls=(RICH_CALL, TIME_CALL),
    ),
    Recorded(
        "qwen3_coder",
        f"<tool_call>\n<function=run>\n<parameter=code>\n{CODE}\n</parameter>\n</function>\n"
        "</tool_call> ok",
        text=" ok",
        calls=(CODE_CALL,),
    ),
    Recorded(  # the first mark is missing, as are the newlines; values of Python and of wrong types
        "qwen3_coder",
        "<function=weather><parameter=city>7</parameter><parameter=days>many</parameter>"
        "<parameter=metric>False</parameter><parameter=tags>['a', {'b': None}]</parameter>"
        "<parameter=unit>7</parameter><parameter=new>[1]</parameter></function></tool_call>",
        calls=(
            (
                "weather",
                {
                    "city": "7",
                    "days": "many",
                    "metric": False,
                    "tags": ["a", {"b": None}],
                    "unit": "7",
                    "new": [1],
                },
            ),
        ),
    ),
    Recorded(
        "qwen3_coder", "<tool_call>\n<function=time>\nno", text="<tool_call>\n<function=time>\nno"
    ),
    # Mistral: the three ways of its generations, and reasoning
    Recorded(
        "mistral",
        f'[TOOL_CALLS] [{{"name": "weather", "arguments": {RICH_JSON}, "id": "abcdefghi"}},'
        ' {"name": "time", "arguments": {}}]',
        calls=(RICH_CALL, TIME_CALL),
    ),
    Recorded(
        "mistral",
        f"Hm. [TOOL_CALLS]weather[ARGS]{RICH_JSON}[TOOL_CALLS]time[ARGS]{{}}",
        text="Hm. ",
        calls=(RICH_CALL, TIME_CALL),
    ),
    Recorded(
        "mistral",
        f"[TOOL_CALLS]run[CALL_ID]a1b2c3d4e[ARGS]{CODE_JSON}[TOOL_CALLS]weather{ROME_JSON}",
        calls=(CODE_CALL, ROME_CALL),
    ),
    Recorded(
        "mistral",
        "[THINK]a [TOOL_CALLS]time{} b[/THINK]So[TOOL_CALLS]time{}",
        text="So",
        reasoning="a [TOOL_CALLS]time{} b",
        calls=(TIME_CALL,),
    ),
    Recorded("mistral", "[TOOL_CALLS][]", text="[TOOL_CALLS][]"),
    # Llama 3
    Recorded(
        "llama3_json",
        f'{{"name": "weather", "parameters": {RICH_JSON}}}; {{"name": "time", "parameters": {{}}}}',
        calls=(RICH_CALL, TIME_CALL),
    ),
    Recorded(
        "llama3_json",
        f'<|python_tag|>{{"type": "function", "name": "run", "parameters": {CODE_JSON}}}',
        calls=(CODE_CALL,),
    ),
    Recorded(
        "llama3_json",
        '{"name": "time", "parameters": {}}; and so on',
        text="; and so on",
        calls=(TIME_CALL,),
    ),
    Recorded("llama3_json", '{"name": "Ann", "age": 3}', text='{"name": "Ann", "age": 3}'),
    Recorded(
        "llama3_json",
        '{"name": "Ann", "parameters": {}} text',
        text='{"name": "Ann", "parameters": {}} text',
    ),
    Recorded(
        "llama3_json",
        'Say {"name": "time", "parameters": {}}',
        text='Say {"name": "time", "parameters": {}}',
    ),
    Recorded("llama3_json", "<|python_tag|>print(1)", text="<|python_tag|>print(1)"),
    # Llama 3.2 and Llama 4
    Recorded("pythonic", f"[{PYTHON_RICH}, time()]", calls=(RICH_CALL, TIME_CALL)),
    Recorded(
        "pythonic",
        f"<|python_start|>[weather(city='Rome'), run(code={json.dumps(CODE, ensure_ascii=False)})]"
        "<|python_end|>",
        calls=(ROME_CALL, CODE_CALL),
    ),
    Recorded("pythonic", '[weather(city="it\\\'s",)]', calls=(("weather", {"city": "it's"}),)),
    Recorded("pythonic", "[link](time)", text="[link](time)"),
    Recorded("pythonic", "[unknown(a=1)]", text="[unknown(a=1)]"),
    Recorded("pythonic", "[time('x')]", text="[time('x')]"),
    # LFM 2
    Recorded(
        "lfm2",
        f"<think>hm</think>I see.<|tool_call_start|>[{PYTHON_RICH}]<|tool_call_end|>Yes.",
        text="I see.Yes.",
        reasoning="hm",
        calls=(RICH_CALL,),
    ),
    # gpt-oss
    Recorded(
        "harmony",
        "<|channel|>analysis<|message|>Need <tools>.<|end|><|start|>assistant<|channel|>commentary"
        "<|message|>I look.<|end|><|start|>assistant<|channel|>commentary to=functions.weather "
        f"<|constrain|>json<|message|>{RICH_JSON}<|call|>",
        text="I look.",
        reasoning="Need <tools>.",
        calls=(RICH_CALL,),
    ),
    Recorded(
        "harmony",
        "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>analysis<|message|>b"
        "<|end|><|start|>assistant to=functions.run<|channel|>commentary json<|message|>"
        f"{CODE_JSON}<|call|><|start|>assistant<|channel|>commentary to=functions.time<|message|>"
        "<|call|>",
        reasoning="a\nb",
        calls=(CODE_CALL, TIME_CALL),
    ),
    Recorded("harmony", "<|channel|>final<|message|>Hi <|there<|return|>", text="Hi <|there"),
    Recorded("harmony", "plain", text="plain"),
    Recorded(
        "harmony",
        "more<|end|><|start|>assistant<|channel|>final<|message|>x",
        text="x",
        reasoning="more",
        begins_in_reasoning=True,
    ),
    Recorded("harmony", "<|channel|>analysis<|message|>on and on", reasoning="on and on"),
    # DeepSeek
    Recorded(
        "deepseek_v3",
        f"I look.<｜tool▁calls▁begin｜>{deepseek_v3('weather', RICH_JSON)}\n"
        f"{deepseek_v3('time', '{}')}<｜tool▁calls▁end｜>",
        text="I look.",
        calls=(RICH_CALL, TIME_CALL),
    ),
    Recorded(
        "deepseek_r1",
        f"So:\n<｜tool▁calls▁begin｜>\n</think>\n\n<｜tool▁calls▁begin｜>"
        f"{deepseek_v3('run', CODE_JSON)}<｜tool▁calls▁end｜>",
        reasoning="So:\n<｜tool▁calls▁begin｜>",
        calls=(CODE_CALL,),
        begins_in_reasoning=True,
    ),
    Recorded(
        "deepseek_r1", "<think>\na</think>b", text="b", reasoning="a", begins_in_reasoning=True
    ),
    Recorded(
        "deepseek_v31",
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{RICH_JSON}"
        "<｜tool▁call▁end｜><｜tool▁call▁begin｜>time<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
        "<｜tool▁calls▁end｜>after",
        text="after",
        calls=(RICH_CALL, TIME_CALL),
    ),
    Recorded(
        "deepseek_v32",
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="weather">\n<｜DSML｜parameter name="city"'
        f' string="true">{RICH["city"]}</｜DSML｜parameter>\n<｜DSML｜parameter name="days"'
        ' string="false">3</｜DSML｜parameter>\n<｜DSML｜parameter name="other" string="true">4'
        '</｜DSML｜parameter>\n</｜DSML｜invoke>\n<｜DSML｜invoke name="time">\n</｜DSML｜invoke>\n'
        "</｜DSML｜function_calls>",
        calls=(("weather", {"city": RICH["city"], "days": 3, "other": "4"}), TIME_CALL),
    ),
    # GLM
    Recorded(
        "glm45",
        "\n<think>Hm <tool_call>time</tool_call></think>\nI look.\n<tool_call>weather\n"
        f"<arg_key>city</arg_key>\n<arg_value>{RICH['city']}</arg_value>\n<arg_key>days</arg_key>\n"
        "<arg_value>3</arg_value>\n<arg_key>metric</arg_key>\n<arg_value>true</arg_value>\n"
        f"<arg_key>tags</arg_key>\n<arg_value>{RICH_TAGS}</arg_value>\n<arg_key>unit</arg_key>\n"
        "<arg_value>null</arg_value>\n</tool_call>\n<tool_call>time\n</tool_call>",
        text="I look.\n",
        reasoning="Hm <tool_call>time</tool_call>",
        calls=(RICH_CALL, TIME_CALL),
    ),
    Recorded(
        "glm45",
        f"<tool_call>run<arg_key>code</arg_key><arg_value>{CODE}</arg_value></tool_call>",
        calls=(CODE_CALL,),
    ),
    Recorded("glm45", "<tool_call> two words </tool_call>", "<tool_call> two words </tool_call>"),
    # Gemma
    Recorded(
        "functiongemma",
        "<start_function_call>call:weather{city:<escape>Rome<escape>,days:3,metric:true}"
        "<end_function_call><start_function_call>call:time{}<end_function_call>",
        calls=(("weather", {"city": "Rome", "days": 3, "metric": True}), TIME_CALL),
    ),
    Recorded(
        "gemma4",
        '<|channel>thought\nHm.\n<channel|>I look.<|tool_call>call:weather{city:<|"|>Zürich "東京"'
        ' 🚀 C:\\x<|"|>,days:3,metric:true,tags:[{<|"|>a<|"|>:null},<|"|>b<|"|>,-1.5e3,[]],'
        "unit:null}"
        "<tool_call|><|tool_call>call:time{}<tool_call|>",
        text="I look.",
        reasoning="Hm.",
        calls=(RICH_CALL, TIME_CALL),
    ),
    Recorded(
        "gemma4", f'<|tool_call>call:run{{code:<|"|>{CODE}<|"|>}}<tool_call|>', calls=(CODE_CALL,)
    ),
    Recorded(  # without quotes
        "gemma4",
        "<|tool_call>call:weather{city:New York, days: 3,unit:x}<tool_call|>",
        calls=(("weather", {"city": "New York", "days": 3, "unit": "x"}),),
    ),
    # Granite 3, Phi 4
    Recorded(
        "granite",
        f'<|tool_call|>[{{"name": "weather", "arguments": {RICH_JSON}}}]',
        calls=(RICH_CALL,),
    ),
    Recorded(
        "granite", "<think>Hm.\n</think>\n<response>Yes.</response>", text="Yes.", reasoning="Hm."
    ),
    Recorded(
        "granite",
        "Here is my thought process:\n\nHm.\n\nHere is my response:\n\nYes.",
        text="Yes.",
        reasoning="Hm.",
    ),
    Recorded("granite", "Here is my dog.", text="Here is my dog."),
    Recorded(
        "phi4",
        f'<|tool_call|>[{{"name": "weather", "arguments": {RICH_JSON}}},'
        ' {"name": "time", "arguments": {}}]<|/tool_call|>',
        calls=(RICH_CALL, TIME_CALL),
    ),
    Recorded("phi4", f'functools[{{"name": "run", "arguments": {CODE_JSON}}}]', calls=(CODE_CALL,)),
    Recorded("phi4", "import functools, re", text="import functools, re"),
    # Kimi K2
    Recorded(
        "kimi_k2",
        f"<think>Hm.</think>I look.<|tool_calls_section_begin|>{kimi(0, 'weather', RICH_JSON)}"
        f"{kimi(1, 'run', CODE_JSON)}<|tool_calls_section_end|>",
        text="I look.",
        reasoning="Hm.",
        calls=(RICH_CALL, CODE_CALL),
    ),
    # MiniMax M2
    Recorded(
        "minimax_m2",
        'Hm.\n</think>\n\n<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">'
        f'{RICH["city"]}</parameter>\n<parameter name="tags">{RICH_TAGS}</parameter>\n</invoke>\n'
        '<invoke name="time">\n</invoke>\n</minimax:tool_call>',
        reasoning="Hm.",
        calls=(("weather", {"city": RICH["city"], "tags": RICH["tags"]}), TIME_CALL),
        begins_in_reasoning=True,
    ),
    # Seed-OSS, Nemotron, Command R7B, Apertus
    Recorded(
        "seed_oss",
        f"<seed:think>Hm.</seed:think>\n<seed:tool_call>\n<function=run>\n<parameter=code>{CODE}"
        "</parameter>\n</function>\n</seed:tool_call>",
        reasoning="Hm.",
        calls=(CODE_CALL,),
    ),
    Recorded(
        "nemotron",
        f'<TOOLCALL>[{{"name": "weather", "arguments": {RICH_JSON}}}]</TOOLCALL>',
        calls=(RICH_CALL,),
    ),
    Recorded(
        "command_r7b",
        '<|START_THINKING|>Hm.<|END_THINKING|><|START_ACTION|>[\n    {"tool_call_id": "0",'
        f' "tool_name": "weather", "parameters": {RICH_JSON}}}\n]<|END_ACTION|>',
        reasoning="Hm.",
        calls=(RICH_CALL,),
    ),
    Recorded(
        "command_r7b",
        "<|START_THINKING|>Hm.<|END_THINKING|><|START_RESPONSE|>Yes.<|END_RESPONSE|>",
        text="Yes.",
        reasoning="Hm.",
    ),
    Recorded(
        "apertus",
        f'<|inner_prefix|>Hm.<|tools_prefix|>[{{"time": {{}}}}]<|inner_suffix|>'
        f'<|tools_prefix|>[{{"weather": {RICH_JSON}}}, {{"time": {{}}}}]<|tools_suffix|>',
        reasoning='Hm.<|tools_prefix|>[{"time": {}}]',
        calls=(RICH_CALL, TIME_CALL),
    ),
    Recorded("think", "<think>a</think>b<tool_call>", text="b<tool_call>", reasoning="a"),
]
