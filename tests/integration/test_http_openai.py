"""The official openai client against the gateway, unmodified."""

import asyncio
from typing import Any

import openai
import pytest

from quadriga.client import Client, SamplingParams
from tests.gateway import MODEL
from tests.server import Server, settle

TEXT = "The quick brown fox"
GREEDY: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": 12}
IGNORE_EOS = {"ignore_eos": True}
HELLO: Any = [{"role": "user", "content": "Hello!"}]


@pytest.fixture(scope="module")
def client(gateway: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{gateway}/v1", api_key="none", max_retries=0, timeout=30)


def complete(client: openai.OpenAI, **changes: Any) -> Any:
    fields = {"prompt": TEXT, **GREEDY, "extra_body": IGNORE_EOS, **changes}
    return client.completions.create(**fields)


def chat(client: openai.OpenAI, **changes: Any) -> Any:
    fields = {"messages": HELLO, **GREEDY, "extra_body": IGNORE_EOS, **changes}
    return client.chat.completions.create(**fields)


def test_a_completion_is_what_the_zmq_client_gets(client: openai.OpenAI, server: Server) -> None:
    answer = complete(client)
    params = SamplingParams(temperature=0, max_new_tokens=12, ignore_eos=True)
    with Client(server.endpoint) as ring:
        expected = ring.generate(TEXT, params)
    assert answer.choices[0].text == expected.text
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.prompt_tokens == expected.usage.prompt_tokens
    assert answer.usage.completion_tokens == 12
    assert answer.model == MODEL
    assert answer.id.startswith("cmpl-")


def test_the_chunks_of_a_stream_joined_are_the_completion(client: openai.OpenAI) -> None:
    chunks = list(complete(client, stream=True))
    assert "".join(c.choices[0].text for c in chunks) == complete(client).choices[0].text
    assert [c.choices[0].finish_reason for c in chunks][-1] == "length"
    assert all(c.choices[0].finish_reason is None for c in chunks[:-1])
    assert all(c.usage is None for c in chunks)
    assert len({c.id for c in chunks}) == 1


def test_usage_is_in_one_last_chunk_when_asked_for(client: openai.OpenAI) -> None:
    chunks = list(complete(client, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 12
    assert all(c.usage is None and c.choices for c in chunks[:-1])


def test_usage_is_in_every_chunk_when_asked_for(client: openai.OpenAI) -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(complete(client, stream=True, stream_options=options))
    counts = [c.usage.completion_tokens for c in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == 12
    assert {c.usage.prompt_tokens for c in chunks} == {complete(client).usage.prompt_tokens}


def test_batches_of_texts_and_token_ids_with_echo_and_n(client: openai.OpenAI) -> None:
    ids = [5, 6, 7]
    answer = complete(client, prompt=[TEXT, "a"], n=2, echo=True)
    assert [c.index for c in answer.choices] == [0, 1, 2, 3]
    assert answer.choices[0].text == TEXT + complete(client).choices[0].text
    assert answer.choices[3].text.startswith("a")
    assert answer.usage.completion_tokens == 48
    echoed = complete(client, prompt=[ids, ids], echo=True).choices
    assert echoed[0].text == echoed[1].text == "#$%" + complete(client, prompt=ids).choices[0].text
    streamed = list(complete(client, prompt=ids, echo=True, stream=True))
    assert "".join(c.choices[0].text for c in streamed) == echoed[0].text


def test_n_choices_differ_and_a_seed_makes_them_the_same_again(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"n": 3, "seed": 7, "temperature": 1.5}
    first = [c.text for c in complete(client, **fields).choices]
    assert len(set(first)) == 3
    assert [c.text for c in complete(client, **fields).choices] == first
    alone = complete(client, seed=7, temperature=1.5)
    assert alone.choices[0].text == first[0]
    streams: dict[int, str] = {}
    for chunk in complete(client, **fields, stream=True):
        choice = chunk.choices[0]
        streams[choice.index] = streams.get(choice.index, "") + choice.text
    assert [streams[index] for index in range(3)] == first


def test_log_probabilities_of_prompt_and_answer(client: openai.OpenAI) -> None:
    choice = complete(client, logprobs=2, echo=True, max_tokens=3, prompt=[5, 6, 7]).choices[0]
    logprobs = choice.logprobs
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.top_logprobs) == 6
    assert logprobs.tokens[:3] == ["#", "$", "%"]
    assert logprobs.token_logprobs[0] is None
    assert logprobs.text_offset[:4] == [0, 1, 2, 3]
    for token, logprob, top in list(
        zip(logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True)
    )[3:]:
        assert top[token] == logprob == max(top.values()), "a greedy token is the likeliest"
    chunks = list(complete(client, logprobs=2, max_tokens=3, prompt=[5, 6, 7], stream=True))
    streamed = [lp for c in chunks for lp in c.choices[0].logprobs.token_logprobs]
    assert streamed == logprobs.token_logprobs[3:]


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_alone_is_scored_where_no_token_is_asked_for(
    client: openai.OpenAI, stream: bool
) -> None:
    prompts: list[list[int]] = [[5, 6, 7], [8, 9, 10, 11]]
    fields: dict[str, Any] = {"logprobs": 1, "echo": True, "prompt": prompts, "n": 2}
    scored = [(c.text, c.logprobs) for c in complete(client, **fields).choices]
    alone: dict[int, Any] = {}
    if stream:
        for chunk in complete(client, **fields, max_tokens=0, stream=True):
            (choice,) = chunk.choices
            assert choice.finish_reason == "length"
            alone[choice.index] = (choice.text, choice.logprobs)
        assert alone[1] == ("#$%", alone[1][1]) and alone[1][1].tokens == []
    else:
        answer = complete(client, **fields, max_tokens=0)
        assert answer.usage.completion_tokens == 0
        assert {choice.finish_reason for choice in answer.choices} == {"length"}
        alone = {choice.index: (choice.text, choice.logprobs) for choice in answer.choices}
        assert alone[1] == alone[0]
    for index, prompt in ((0, prompts[0]), (2, prompts[1])):
        text, expected = scored[index]
        count = len(prompt)
        assert text.startswith(alone[index][0])
        assert alone[index][1].token_logprobs == expected.token_logprobs[:count]
        assert alone[index][1].text_offset == expected.text_offset[:count]


def test_prompt_logprobs_in_vllms_format(client: openai.OpenAI) -> None:
    wanted: dict[str, Any] = {"extra_body": {"prompt_logprobs": 2, **IGNORE_EOS}}
    choice = complete(client, prompt=[5, 6, 7], **wanted, logprobs=0).choices[0]
    scored = complete(client, prompt=[5, 6, 7], logprobs=2, echo=True).choices[0].logprobs
    assert len(choice.logprobs.tokens) == 12, "those of the answer stay by themselves"
    first, *others = choice.model_extra["prompt_logprobs"]
    assert first is None
    values = [entry[str(number)]["logprob"] for entry, number in zip(others, [6, 7], strict=True)]
    assert values == scored.token_logprobs[1:3]
    assert len(chat(client, **wanted).model_extra["prompt_logprobs"]) > 3
    with pytest.raises(openai.BadRequestError, match="cannot be streamed"):
        complete(client, stream=True, **wanted)


def test_log_probabilities_of_a_chat(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"logprobs": True, "top_logprobs": 3, "max_tokens": 4}
    answer = chat(client, **fields).choices[0]
    assert len(answer.logprobs.content) == 4
    for token in answer.logprobs.content:
        assert token.top_logprobs[0].logprob == token.logprob
        assert bytes(token.top_logprobs[0].bytes) == bytes(token.bytes)
    streamed = [
        token.logprob
        for chunk in chat(client, **fields, stream=True)
        if chunk.choices[0].logprobs
        for token in chunk.choices[0].logprobs.content
    ]
    assert streamed == [token.logprob for token in answer.logprobs.content]
    with pytest.raises(openai.BadRequestError, match="needs logprobs"):
        chat(client, top_logprobs=3)
    with pytest.raises(openai.BadRequestError, match="<= 20"):
        chat(client, logprobs=True, top_logprobs=10**6)


def test_a_stop_string_ends_the_text_and_is_named(client: openai.OpenAI) -> None:
    whole = complete(client).choices[0].text
    middle = whole[len(whole) // 2 :][:3]
    choice = complete(client, stop=[middle]).choices[0]
    assert choice.finish_reason == "stop"
    assert choice.text == whole[: whole.index(middle)]
    assert choice.model_extra["stop_reason"] == middle


def test_max_tokens_is_16_by_default_for_a_text(client: openai.OpenAI) -> None:
    answer = complete(client, max_tokens=openai.omit)
    assert answer.usage.completion_tokens == 16


def test_a_chat_answers_whole_and_streamed_alike(client: openai.OpenAI) -> None:
    answer = chat(client)
    assert answer.object == "chat.completion"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "length"
    chunks = list(chat(client, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == answer.choices[0].message.content
    assert chunks[-1].usage == answer.usage.model_copy(
        update={"prompt_tokens_details": chunks[-1].usage.prompt_tokens_details}
    )


def test_a_chat_without_a_limit_may_fill_the_context(client: openai.OpenAI) -> None:
    answer = chat(client, max_tokens=openai.omit)
    assert answer.usage.total_tokens == 256


def test_content_parts_are_one_text(client: openai.OpenAI) -> None:
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo!"}]
    messages: Any = [{"role": "user", "content": parts}]
    answer = chat(client, messages=messages)
    assert answer.choices[0].message.content == chat(client).choices[0].message.content
    with pytest.raises(openai.BadRequestError, match="image_url"):
        chat(client, messages=[{"role": "user", "content": [{"type": "image_url"}]}])


def test_many_streams_at_once_each_get_their_own(gateway: str, client: openai.OpenAI) -> None:
    async def stream_text(ring: openai.AsyncOpenAI, number: int) -> str:
        text = ""
        fields: Any = {**GREEDY, "extra_body": IGNORE_EOS}
        stream = await ring.completions.create(prompt=[3 + number] * 5, stream=True, **fields)
        async for chunk in stream:
            text += chunk.choices[0].text
        return text

    async def all_of_them() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{gateway}/v1", api_key="none") as ring:
            return await asyncio.gather(*(stream_text(ring, number) for number in range(24)))

    together = asyncio.run(all_of_them())
    prompts = [[3 + number] * 5 for number in range(24)]
    alone = [choice.text for choice in complete(client, prompt=prompts).choices]
    assert together == alone


def test_leaving_a_stream_ends_its_request(client: openai.OpenAI, server: Server) -> None:
    with Client(server.endpoint) as ring:
        before = ring.info()["ended"]["abort"]
        with complete(client, stream=True, max_tokens=250, prompt=[5]) as stream:
            next(iter(stream))
        info = settle(server.endpoint)
    assert info["ended"]["abort"] == before + 1


@pytest.mark.parametrize(
    ("changes", "error", "param", "said"),
    [
        ({"model": "gpt-7"}, openai.NotFoundError, "model", "use 'tiny'"),
        ({"max_tokens": "4"}, openai.BadRequestError, "max_tokens", "int"),
        ({"max_tokens": 0}, openai.BadRequestError, "max_tokens", "at least 1"),
        ({"max_tokens": 1000}, openai.BadRequestError, "max_tokens", "context is 256"),
        ({"prompt": [5] * 300}, openai.BadRequestError, "prompt", "300 tokens"),
        ({"prompt": [600]}, openai.BadRequestError, "prompt", "0 to 511"),
        ({"prompt": [600], "echo": True}, openai.BadRequestError, "prompt", "0 to 511"),
        ({"prompt": []}, openai.BadRequestError, "prompt", "empty"),
        ({"prompt": [5, "a"]}, openai.BadRequestError, "prompt", "mixes"),
        ({"prompt": [[5], [2**40]]}, openai.BadRequestError, "prompt", "token ids"),
        ({"prompt": None}, openai.BadRequestError, "prompt", "prompt"),
        ({"n": 0}, openai.BadRequestError, "n", "n is 0"),
        ({"n": 5_000_000}, openai.BadRequestError, "n", "n is 5000000"),
        ({"n": 128, "prompt": ["a"] * 9}, openai.BadRequestError, "prompt", "1152"),
        ({"best_of": 3}, openai.BadRequestError, "best_of", "only 1"),
        ({"suffix": "end"}, openai.BadRequestError, "suffix", "<|fim_prefix|>"),
        ({"temperature": -1}, openai.BadRequestError, "temperature", "from 0 to 1000000"),
        ({"temperature": 1e39}, openai.BadRequestError, "temperature", "from 0 to 1000000"),
        ({"stop": [""]}, openai.BadRequestError, "stop", "empty string"),
        ({"seed": 2**63}, openai.BadRequestError, "seed", "from 0"),
        ({"extra_body": {"priority": 5000}}, openai.BadRequestError, "priority", "1000"),
        ({"extra_body": {"beam_width": 2}}, openai.BadRequestError, "beam_width", "leave it out"),
    ],
)
def test_bad_input_is_an_exception_that_names_the_field(
    client: openai.OpenAI, changes: dict[str, Any], error: type[Exception], param: str, said: str
) -> None:
    with pytest.raises(error) as caught:
        complete(client, **changes)
    assert isinstance(caught.value, openai.APIStatusError)
    assert caught.value.param == param
    assert said in str(caught.value)


def test_a_bad_request_for_a_stream_is_a_status_not_an_event(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="context is 256"):
        complete(client, stream=True, max_tokens=1000)


def test_parameters_with_neutral_values_are_accepted(client: openai.OpenAI) -> None:
    neutral: dict[str, Any] = {"frequency_penalty": 0, "presence_penalty": 0.0, "best_of": 1}
    assert complete(client, user="me", **neutral).choices[0].text
    assert chat(client, metadata={"a": "b"}, store=False, service_tier="auto").choices
