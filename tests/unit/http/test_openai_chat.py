"""OpenAI's chat: reasoning, tools in all their forms, fields without effect, and bad input."""

from typing import Any

import openai
import pytest
from openai.types.chat import completion_create_params

from quadriga.errors import InvalidRequest
from quadriga.server.answer_format import KNOWN_FORMATS, AnswerFormat, ReasoningFormat, to_info
from tests.unit.scripted_ring import ASK, HERMES, ScriptedRing, openai_before

THINKING = to_info(AnswerFormat(calls=HERMES, reasoning=ReasoningFormat(switch="enable_thinking")))
ANSWER = ["<thi", "nk>\nHm, ", "<tool_call>?", "\n</think>", "\n\nIt is ", "5."]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
WEATHER: Any = {"name": "weather", "parameters": {"type": "object"}}
CLOCK: Any = {"name": "clock"}
TOOLS: Any = [{"type": "function", "function": each} for each in (WEATHER, CLOCK)]
CALLED: Any = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {"id": "a1", "type": "function", "function": {"name": "gone", "arguments": "{}"}}
    ],
}


def thinking_ring(pieces: list[str] = ANSWER) -> ScriptedRing:
    return ScriptedRing(pieces, answer_format=THINKING)


async def streamed(client: openai.AsyncOpenAI, **fields: Any) -> tuple[str, str]:
    """Return the reasoning and the content of a stream."""
    reasoning = content = ""
    async for part in await client.chat.completions.create(**ASK, **fields, stream=True):
        delta: Any = part.choices[0].delta
        content += delta.content or ""
        reasoning += getattr(delta, "reasoning_content", "") or ""
        assert getattr(delta, "reasoning", None) == getattr(delta, "reasoning_content", None)
    return reasoning, content


async def test_reasoning_stands_beside_the_content_whole_and_streamed() -> None:
    async with openai_before(thinking_ring()) as (client, _):
        answer = await client.chat.completions.create(**ASK, tools=TOOLS)
        message: Any = answer.choices[0].message
        assert message.content == "It is 5."
        assert message.reasoning_content == message.reasoning
        assert message.reasoning.strip() == "Hm, <tool_call>?"
        assert not message.tool_calls, "a call within the reasoning is none"
        assert await streamed(client, tools=TOOLS) == (message.reasoning, "It is 5.")


async def test_reasoning_is_left_out_or_left_in_the_content() -> None:
    async with openai_before(thinking_ring()) as (client, _):
        for fields, content in (
            ({"include_reasoning": False}, "It is 5."),
            ({"separate_reasoning": False}, "".join(ANSWER)),
        ):
            body: Any = {**ASK, "extra_body": fields}
            message: Any = (await client.chat.completions.create(**body)).choices[0].message
            assert message.content == content
            assert not hasattr(message, "reasoning_content")
            assert await streamed(client, extra_body=fields) == ("", content)


@pytest.mark.parametrize(
    ("fields", "switch", "effort"),
    [
        ({}, None, None),
        ({"reasoning_effort": "none"}, False, None),
        ({"reasoning_effort": "high"}, True, "high"),
        ({"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}, False, None),
        (
            {
                "reasoning_effort": "low",
                "extra_body": {"chat_template_kwargs": {"enable_thinking": False}},
            },
            False,
            "low",
        ),
    ],
)
async def test_the_template_learns_whether_and_how_much_to_reason(
    fields: Any, switch: bool | None, effort: str | None
) -> None:
    ring = thinking_ring()
    async with openai_before(ring) as (client, _):
        await client.chat.completions.create(**ASK, **fields)
        arguments = ring.submitted[0][2]["chat"].template_args
        assert arguments.get("enable_thinking") == switch
        assert arguments.get("reasoning_effort") == effort


async def test_a_template_without_a_switch_has_its_reasoning_closed_at_once() -> None:
    ring = ScriptedRing(["5."], answer_format=to_info(AnswerFormat(reasoning=ReasoningFormat())))
    async with openai_before(ring) as (client, _):
        await client.chat.completions.create(**ASK, reasoning_effort="none")
        await client.chat.completions.create(**ASK, extra_body={"thinking_token_budget": 7})
        budgets = [params.thinking_token_budget for _, params, _ in ring.submitted]
        assert budgets == [0, 7]


async def test_the_reasoning_of_earlier_answers_goes_to_the_template() -> None:
    ring = thinking_ring()
    async with openai_before(ring) as (client, _):
        for name in ("reasoning_content", "reasoning"):
            earlier: Any = {"role": "assistant", "content": "5", name: "Hm."}
            await client.chat.completions.create(
                model="tiny", messages=[*ASK["messages"], earlier, *ASK["messages"]]
            )
            assert ring.submitted[-1][0][1]["reasoning_content"] == "Hm."


def allowed(mode: str, *names: str) -> Any:
    listed = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": listed}}


async def test_the_model_sees_the_allowed_tools_only() -> None:
    ring = ScriptedRing([CALL])
    async with openai_before(ring) as (client, _):
        for mode in ("auto", "required"):
            choice = allowed(mode, "weather")
            await client.chat.completions.create(**ASK, tools=TOOLS, tool_choice=choice)
            _, params, options = ring.submitted[-1]
            assert [tool["function"]["name"] for tool in options["chat"].tools] == ["weather"]
            assert (params.structural_tag is not None) == (mode == "required")


async def test_functions_in_openais_older_form_are_called_and_answered() -> None:
    ring = ScriptedRing([CALL])
    history: Any = [
        *ASK["messages"],
        {"role": "assistant", "content": None,
         "function_call": {"name": "weather", "arguments": "{}"}},
        {"role": "function", "name": "weather", "content": "wet"},
    ]  # fmt: skip
    async with openai_before(ring) as (client, _):
        body: Any = {"model": "tiny", "messages": history, "functions": [WEATHER]}
        choice = (await client.chat.completions.create(**body)).choices[0]
        assert choice.finish_reason == "function_call" and not choice.message.tool_calls
        assert choice.message.function_call is not None
        assert choice.message.function_call.name == "weather"
        sent = ring.submitted[0][0]
        assert sent[1]["tool_calls"][0]["id"] == sent[2]["tool_call_id"]
        assert sent[2]["role"] == "tool"
        name = arguments = ""
        async for part in await client.chat.completions.create(**body, stream=True):
            if (call := part.choices[0].delta.function_call) is not None:
                name, arguments = name + (call.name or ""), arguments + (call.arguments or "")
        assert (name, arguments) == ("weather", '{"city": "Rome"}')
        await client.chat.completions.create(**body, function_call={"name": "weather"})
        assert ring.submitted[-1][1].structural_tag is not None


WITHOUT_EFFECT: dict[str, Any] = {
    "audio": None,
    "metadata": {"a": "b"},
    "modalities": ["text"],
    "moderation": {"model": "m"},
    "prediction": {"type": "content", "content": "It"},
    "prompt_cache_key": "k",
    "prompt_cache_options": {"mode": "implicit"},
    "prompt_cache_retention": "24h",
    "safety_identifier": "s",
    "service_tier": "auto",
    "store": False,
    "user": "u",
    "verbosity": "low",
    "web_search_options": {},
}


def test_every_field_of_openais_client_is_known() -> None:
    from http_proc.generation.sampling import CHAT
    from http_proc.generation.schema import ChatRequest

    theirs = completion_create_params.CompletionCreateParamsBase.__annotations__.keys()
    assert theirs - {"messages"} - CHAT.keys() - set(ChatRequest.__struct_fields__) == set()


async def test_fields_without_effect_are_taken_and_misspelt_ones_refused() -> None:
    ring = ScriptedRing(["5"])
    async with openai_before(ring) as (client, _):
        await client.chat.completions.create(**ASK, **WITHOUT_EFFECT)
        plain = ring.submitted[0][1]
        await client.chat.completions.create(**ASK)
        assert ring.submitted[1][1] == plain
        with pytest.raises(openai.BadRequestError, match="near it: temperature") as refused:
            await client.chat.completions.create(**ASK, extra_body={"temprature": 0})
        assert refused.value.param == "temprature"


async def test_the_last_message_is_continued_and_the_prompt_left_open() -> None:
    ring = ScriptedRing(["5"])
    async with openai_before(ring) as (client, _):
        for fields, expected in (
            ({}, (False, True)),
            ({"continue_final_message": True}, (True, False)),
            ({"add_generation_prompt": False}, (False, False)),
        ):
            await client.chat.completions.create(**ASK, extra_body=fields)
            chat = ring.submitted[-1][2]["chat"]
            assert (chat.continue_final_message, chat.add_generation_prompt) == expected


IMAGE = {"type": "image_url", "image_url": {"url": "data:,"}}


def saying(*messages: Any) -> dict[str, Any]:
    return {"messages": [*ASK["messages"], *messages]}


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        (saying({"role": "tool", "tool_call_id": "b2", "content": "x"}),
         "messages[1].tool_call_id", "'b2'"),
        (saying({"role": "tool", "tool_call_id": "a1", "content": "x"}, CALLED),
         "messages[1].tool_call_id", "before it"),
        (saying({"role": "user", "content": [{"type": "text", "text": "See"}, IMAGE]}),
         "messages[1].content[1]", "takes only text"),
        (saying({**CALLED, "tool_calls": [{"id": "c", "type": "function",
                 "function": {"name": "f", "arguments": "{"}}]}),
         "messages[1].tool_calls", "not JSON"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0]", "'a b'"),
        ({"tools": [{"type": "function", "function": {"name": "n" * 129}}]}, "tools[0]", "128"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "tools", "twice"),
        ({"functions": [{"name": "ä"}]}, "functions[0]", "'ä'"),
        ({"functions": [WEATHER], "tools": TOOLS}, "functions", "leave functions out"),
        ({"functions": [WEATHER], "function_call": {"name": "x"}}, "function_call", "'x'"),
        ({"function_call": "auto"}, "function_call", "needs functions"),
        ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice", "must be"),
        ({"tools": TOOLS, "tool_choice": allowed("auto", "x")}, "tool_choice", "'x'"),
        ({"tools": TOOLS, "tool_choice": allowed("none", "clock")}, "tool_choice", "'required'"),
        ({"tool_choice": "required"}, "tool_choice", "give tools"),
        ({"reasoning_effort": "huge"}, "reasoning_effort", "'high', 'low', 'max', 'medium'"),
        (saying({"role": "critic", "content": "x"}), "messages",
         "'assistant', 'developer', 'function', 'system', 'tool', 'user'"),
        ({"audio": {"voice": "alloy", "format": "mp3"}}, "audio", "null"),
        ({"continue_final_message": True, "add_generation_prompt": True},
         "add_generation_prompt", "both true"),
    ],
)  # fmt: skip
async def test_bad_input_is_refused_with_the_field(fields: Any, param: str, said: str) -> None:
    async with openai_before(ScriptedRing(["x"])) as (client, _):
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError) as refused:
                await client.post(
                    "/chat/completions", cast_to=object, body={**ASK, **fields, "stream": stream}
                )
            assert refused.value.param == param
            assert said in refused.value.message


async def test_a_history_with_parallel_calls_of_tools_that_are_gone_is_taken() -> None:
    ring = ScriptedRing(["ok"])
    second = {"id": "a2", "type": "function", "function": {"name": "gone", "arguments": "{}"}}
    calling = {**CALLED, "tool_calls": [*CALLED["tool_calls"], second]}
    answers = [{"role": "tool", "tool_call_id": name, "content": "x"} for name in ("a2", "a1")]
    async with openai_before(ring) as (client, _):
        await client.chat.completions.create(**{**ASK, **saying(calling, *answers)})
        assert [turn["role"] for turn in ring.submitted[0][0]][1:] == ["assistant", "tool", "tool"]


async def test_render_returns_the_prompt_of_a_chat_or_of_a_text() -> None:
    ring = ScriptedRing([])
    async with openai_before(ring) as (client, _):
        render = client.with_options(base_url=str(client.base_url).removesuffix("v1/"))
        body: Any = {**ASK, "tools": TOOLS, "reasoning_effort": "low", "temperature": 0}
        answer: Any = await render.post("/render", cast_to=object, body=body)
        assert answer == {"prompt": "rendered", "tokens": [1, 1, 1], "count": 3}
        chat = ring.submitted[0][2]["chat"]
        assert len(chat.tools) == 2 and chat.template_args == {"reasoning_effort": "low"}
        answer = await render.post("/render", cast_to=object, body={"prompt": "Hi"})
        assert answer["count"] == 3 and ring.submitted[1][0] == "Hi"
        for wrong in ({}, {**ASK, "prompt": "Hi"}, {**ASK, "tool_choice": "required"}):
            with pytest.raises(openai.BadRequestError):
                await render.post("/render", cast_to=object, body=wrong)
        ring.error = InvalidRequest("the model's chat template refused: no", "prompt")
        with pytest.raises(openai.BadRequestError, match="refused") as refused:
            await render.post("/render", cast_to=object, body=ASK)
        assert refused.value.param == "messages"


async def test_the_card_of_a_model_says_what_it_can_do() -> None:

    known = AnswerFormat(source="known", calls=HERMES, reasoning=ReasoningFormat())
    async with openai_before(ScriptedRing([], answer_format=to_info(known))) as (client, _):
        card: Any = (await client.models.list()).data[0]
        assert card.id == card.root == "tiny" and card.parent is None
        assert card.capabilities == {"chat": True, "tools": True, "reasoning": True}
        assert card.answer_format == "known"


async def test_usage_has_the_tokens_of_the_reasoning_whole_and_streamed() -> None:
    async with openai_before(thinking_ring()) as (client, _):
        whole = (await client.chat.completions.create(**ASK)).usage
        parts = await client.chat.completions.create(
            **ASK, stream=True, stream_options={"include_usage": True}
        )
        *_, last = [part async for part in parts]
        for usage in (whole, last.usage):
            assert usage is not None and usage.completion_tokens_details is not None
            # "<thi", "nk>\nHm, ", "<tool_call>?" and "\n</think>"
            assert usage.completion_tokens_details.reasoning_tokens == 4
        whole = (
            await client.chat.completions.create(**ASK, extra_body={"separate_reasoning": False})
        ).usage
        assert whole is not None and whole.completion_tokens_details is None


async def test_gpt_oss_has_reasoning_calls_and_grammars_in_its_channels() -> None:
    thought = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    final = "<|channel|>final<|message|>"
    harmony = to_info(KNOWN_FORMATS["harmony"])
    ring = ScriptedRing([thought, final, "{}"], answer_format=harmony)
    async with openai_before(ring) as (client, _):
        body: Any = {**ASK, "response_format": {"type": "json_object"}}
        message: Any = (await client.chat.completions.create(**body)).choices[0].message
        assert (message.reasoning, message.content) == ("Hm.", "{}")
        params = ring.submitted[0][1]
        assert params.json_schema is None and not params.skip_special_tokens
        assert final in str(params.structural_tag)
        call = '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"a": 1}'
        ring.pieces = [thought, call]
        for choice in ("auto", "required"):
            answer = await client.chat.completions.create(**ASK, tools=TOOLS, tool_choice=choice)
            (parsed,) = answer.choices[0].message.tool_calls or []
            assert parsed.type == "function" and parsed.function.arguments == '{"a": 1}'
            assert (ring.submitted[-1][1].structural_tag is not None) == (choice == "required")


async def test_token_ids_are_those_of_the_prompt_and_of_each_choice_whole_and_streamed() -> None:
    ring = thinking_ring(["Hel", "lo"])
    async with openai_before(ring) as (client, _):
        wanted: Any = {"return_token_ids": True}
        whole: Any = await client.chat.completions.create(**ASK, extra_body=wanted)
        assert whole.prompt_token_ids == [1, 1, 1]
        text: Any = await client.completions.create(model="tiny", prompt="x", extra_body=wanted)
        assert text.choices[0].prompt_token_ids == [1, 1, 1]
        given: Any = await client.completions.create(
            model="tiny", prompt=[7, 8, 9], extra_body=wanted
        )
        assert given.choices[0].prompt_token_ids == [7, 8, 9]
        for ids, stream in (
            (whole.choices[0].token_ids,
             await client.chat.completions.create(**ASK, extra_body=wanted, stream=True)),
            (text.choices[0].token_ids,
             await client.completions.create(
                 model="tiny", prompt="x", extra_body=wanted, stream=True)),
        ):  # fmt: skip
            parts: list[Any] = [part async for part in stream]
            of_choices = [part.choices[0] for part in parts]
            streamed_ids = [id_ for one in of_choices for id_ in getattr(one, "token_ids", [])]
            assert set(streamed_ids) == set(ids) == {1}, "those of the scripted ring"
            first = [getattr(one, "prompt_token_ids", None) for one in (parts[0], of_choices[0])]
            assert [1, 1, 1] in first
        plain = (await client.chat.completions.create(**ASK)).to_dict()
        assert "prompt_token_ids" not in plain and "token_ids" not in plain["choices"][0]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"top_p": 0}, {"top_p": 1.0, "temperature": 0.0}),
        ({"top_p": 0.0, "temperature": 1.0}, {"top_p": 1.0, "temperature": 0.0}),
        ({"seed": -1}, {"seed": None}),
        ({"seed": -2}, {"seed": 2**63 - 2}),
        ({"seed": -(2**63)}, {"seed": 0}),
        ({"seed": 5}, {"seed": 5}),
    ],
)
async def test_values_that_other_servers_take_are_read_as_there(fields: Any, expected: Any) -> None:
    ring = thinking_ring(["a"])
    async with openai_before(ring) as (client, _):
        await client.chat.completions.create(**{**ASK, **fields})
        params = ring.submitted[-1][1]
        assert {name: getattr(params, name) for name in expected} == expected
