"""The gateway knows the marks of the model's reasoning, and log-probabilities of chosen ids."""

from typing import Any

import openai
import pytest

from http_proc.apis.sglang import LogprobLists
from http_proc.generation.logprobs import chat_logprobs
from quadriga.client.types import LikelyToken, StreamChunk, TokenLogprob
from quadriga.server.answer_format import AnswerFormat, ReasoningFormat, to_info
from tests.unit.http.anthropic_calls import ask as message
from tests.unit.scripted_ring import ASK, ScriptedRing, openai_before

REASONING = to_info(AnswerFormat(reasoning=ReasoningFormat()))
LIKELY = [LikelyToken(9, -0.25, b"nine"), LikelyToken(4, -0.5, b"four")]
CHOSEN = [LikelyToken(9, -0.25, b"nine"), LikelyToken(5, -8.0, b"five")]


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
async def test_a_budget_reaches_the_ring_with_the_marks_of_the_model(endpoint: str) -> None:
    ring = ScriptedRing(["a"], answer_format=REASONING)
    async with openai_before(ring) as (client, _):
        extra = {"thinking_token_budget": 7}
        if endpoint == "chat":
            await client.chat.completions.create(**ASK, extra_body=extra)
        else:
            await client.completions.create(model="tiny", prompt="<think>", extra_body=extra)
        params = ring.submitted[0][1]
        assert params.thinking_token_budget == 7
        assert (params.thinking_start, params.thinking_end) == ("<think>", "\n</think>\n\n")


async def test_a_chats_grammar_has_the_reasoning_before_it_and_a_completions_has_not() -> None:
    ring = ScriptedRing(["{}"], answer_format=REASONING)
    wanted: Any = {"type": "json_object"}
    async with openai_before(ring) as (client, _):
        await client.chat.completions.create(**ASK, response_format=wanted)
        extra = {"response_format": wanted}
        await client.completions.create(model="tiny", prompt="a", extra_body=extra)
        chat, completion = (params for _prompt, params, _options in ring.submitted)
        assert chat.json_schema == completion.json_schema == {"type": "object"}
        assert (chat.thinking_end, completion.thinking_end) == ("\n</think>\n\n", "")
        assert chat.thinking_token_budget is None


@pytest.mark.parametrize(
    ("is_default", "arguments", "has_marks"),
    [
        (True, {}, True),
        (True, {"enable_thinking": False}, False),
        (False, {}, False),
        (False, {"enable_thinking": True}, True),
    ],
)
async def test_a_grammar_begins_at_once_where_the_reasoning_is_off(
    is_default: bool, arguments: Any, has_marks: bool
) -> None:
    reasoning = ReasoningFormat(switch="enable_thinking", is_default=is_default)
    ring = ScriptedRing(["{}"], answer_format=to_info(AnswerFormat(reasoning=reasoning)))
    async with openai_before(ring) as (client, _):
        wanted: Any = {"type": "json_object"}
        extra = {"chat_template_kwargs": arguments}
        await client.chat.completions.create(**ASK, response_format=wanted, extra_body=extra)
        assert (ring.submitted[0][1].thinking_end != "") == has_marks


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
async def test_a_budget_for_a_model_that_marks_no_reasoning_is_refused(endpoint: str) -> None:
    async with openai_before(ScriptedRing(["a"])) as (client, _):
        extra = {"thinking_token_budget": 7}
        if endpoint == "chat":
            answer: Any = client.chat.completions.create(**ASK, extra_body=extra)
        else:
            answer = client.completions.create(model="tiny", prompt="a", extra_body=extra)
        with pytest.raises(openai.BadRequestError, match=r"thinking_token_budget is 7: .*marks no"):
            await answer


async def test_the_marks_are_no_fields_of_a_request() -> None:
    async with openai_before(ScriptedRing(["a"])) as (client, _):
        for field in ("thinking_start", "thinking_end"):
            with pytest.raises(openai.BadRequestError, match=field):
                await client.chat.completions.create(**ASK, extra_body={field: "x"})


def test_a_chat_lists_a_chosen_token_that_is_among_the_likeliest_once() -> None:
    token = TokenLogprob(1, -0.75, b"a", [*LIKELY, *CHOSEN])
    (entry,) = chat_logprobs([token])["content"]
    assert [top["token"] for top in entry["top_logprobs"]] == ["nine", "four", "five"]


def test_chosen_tokens_have_a_list_of_their_own_in_sglangs_answer() -> None:
    token = TokenLogprob(1, -0.75, b"a", [*LIKELY, *CHOSEN])
    chunk = StreamChunk("r", "a", [1], [0.0], 0.0, logprobs=[token], prompt_logprobs=[token])
    lists = LogprobLists(start=0, num_chosen=2).of(chunk)
    assert lists["output_top_logprobs"] == [[[-0.25, 9, "nine"], [-0.5, 4, "four"]]]
    assert lists["output_token_ids_logprobs"] == [[[-0.25, 9, "nine"], [-8.0, 5, "five"]]]
    assert "input_token_ids_logprobs" not in lists
    assert "output_token_ids_logprobs" not in LogprobLists(0, 0).of(chunk)


def test_a_budget_of_anthropics_api_is_a_limit_that_any_model_may_have() -> None:
    thinking = {"type": "enabled", "budget_tokens": 5}
    reasons = ScriptedRing(["a"], answer_format=REASONING)
    assert message(reasons, thinking=thinking, max_tokens=20).status == 200
    params = reasons.submitted[0][1]
    assert (params.thinking_token_budget, params.thinking_end) == (5, "\n</think>\n\n")
    plain = ScriptedRing(["a"])
    assert message(plain, thinking=thinking, max_tokens=20).status == 200
    assert plain.submitted[0][1].thinking_token_budget is None
