"""Decisions over HTTP: questions, labels of one and several tokens, and both formats."""

from typing import Any

import openai
import pytest

from quadriga.client.decisions import MAX_LABELS, MAX_QUESTIONS
from tests.unit.http.calls import send
from tests.unit.scripted_ring import gateway_before, openai_before
from tests.unit.word_ring import WordRing


async def test_openais_client_reads_every_kind_of_answer() -> None:
    ring = WordRing()
    questions: Any = [
        {"type": "predicate", "instructions": "It is true.", "name": "truth"},
        {
            "type": "choice", "instructions": "Where?",
            "choices": [{"value": "Paris"}, {"value": "New York", "description": "a city"}],
        },
        {"type": "score", "instructions": "How?", "levels": [{"label": "bad"}, {"label": "good"}]},
    ]  # fmt: skip
    async with openai_before(ring) as (client, _):
        decision = await client.decisions.create(
            model="tiny", input="The state.", questions=questions
        )
    answers: Any = decision.answers
    truth, place, rate = answers
    assert (truth.type, truth.name) == ("predicate", "truth")
    assert truth.probability == pytest.approx(0.3 / 0.4)
    assert place.type == "choice"
    # The product of the tokens of "New York" is 0.05.
    assert [each.probability for each in place.probabilities] == pytest.approx([0.8, 0.2])
    assert (place.choice, place.confidence) == ("Paris", pytest.approx(0.8))
    assert rate.type == "score"
    assert rate.score == pytest.approx(0.75)
    assert [each.label for each in rate.probabilities] == ["bad", "good"]
    masses = [answer.model_extra["label_mass"] for answer in answers]
    assert masses == pytest.approx([0.4, 0.25, 0.08])
    assert decision.usage.input_tokens_details.cached_tokens == 5 * 4
    assert decision.usage.output_tokens == 0
    poolings = [params.pooling for _, params, _ in ring.submitted]
    assert [(len(each.token_ids), each.num_last) for each in poolings] == [
        (2, 0), (1, 0), (0, 2), (2, 0),
    ], "labels of one token share a request"  # fmt: skip
    assert [answer.model_extra["argmax_is_label"] for answer in answers] == [False] * 3
    assert all(text.startswith("user: The state.\n\n") for text in ring.prompts)


async def test_a_label_is_the_argmax_if_all_of_its_tokens_are() -> None:
    ring = WordRing()
    choices = [["York", "Paris"], ["York York", "Paris"], ["New York", "Paris"]]
    questions = [
        {"type": "choice", "instructions": "x", "choices": [{"value": each} for each in values]}
        for values in choices
    ]
    async with gateway_before(ring) as (_, gateway):
        answer = await send(gateway, "/v1/decisions", {"input": "a", "questions": questions})
    found = [each["argmax_is_label"] for each in answer.body["answers"]]
    assert found == [True, True, False]


async def test_a_question_that_is_too_long_is_refused_alone() -> None:
    ring = WordRing()
    ring.facts["context_length"] = 400
    long, short = {**PREDICATE, "name": "long", "instructions": "x" * 500}, PREDICATE
    async with gateway_before(ring) as (_, gateway):
        body = {"input": "a", "questions": [short, long, short]}
        answer = await send(gateway, "/v1/decisions", body)
        refused = await send(gateway, "/v1/decisions", {"input": "a", "questions": [long]})
        named = {"a": {"type": "noul", "instructions": "x"}, "b": {"type": "noul", "instructions":
                 "x" * 500}}  # fmt: skip
        by_name = await send(gateway, "/v1/systemone", {"state": "a", "questions": named})
    first, second, third = answer.body["answers"]
    assert first == third
    assert (second["type"], second["name"]) == ("refusal", "long")
    assert "the model's context is 400" in second["refusal"]
    assert refused.status == 400
    assert refused.body["error"]["code"] == "context_length_exceeded"
    assert by_name.body["answers"]["a"]["type"] == "noul"
    assert by_name.body["answers"]["b"]["type"] == "refusal"


async def test_parts_of_instructions_are_read_as_one_text() -> None:
    ring = WordRing()
    parts: Any = [
        {"type": "input_text", "text": "Is it"}, {"type": "input_json", "data": {"a": 1}},
    ]  # fmt: skip
    image = [{"type": "input_image", "image_url": "x"}]
    async with gateway_before(ring) as (_, gateway):
        body = {"input": "a", "questions": [{**PREDICATE, "instructions": parts}]}
        assert (await send(gateway, "/v1/decisions", body)).status == 200
        body = {"input": "a", "questions": [{**PREDICATE, "instructions": image}]}
        refused = await send(gateway, "/v1/decisions", body)
    assert '\nIs it\n{"a": 1}\n\nAnswer' in ring.prompts[0]
    assert "questions[0].instructions[0].type is 'input_image'" in refused.body["error"]["message"]


async def test_priority_and_salt_are_those_of_every_request() -> None:
    ring = WordRing()
    body = {"questions": [PREDICATE], "priority": 7, "cache_salt": "mine"}
    system_one = {**body, "state": "a", "questions": {"a": {"type": "noul", "instructions": "x"}}}
    async with gateway_before(ring) as (_, gateway):
        await send(gateway, "/v1/decisions", {**body, "input": "a"})
        await send(gateway, "/v1/systemone", system_one)
    asked = [(options["priority"], options["cache_salt"]) for _, _, options in ring.submitted]
    assert asked == [(7, "mine")] * 2


async def test_reasoning_is_turned_off_where_the_template_can() -> None:
    ring = WordRing()
    ring.facts["answer_format"] = {"reasoning": {"switch": "enable_thinking"}}
    async with gateway_before(ring) as (_, gateway):
        await send(gateway, "/v1/decisions", {"input": "a", "questions": [PREDICATE]})
    assert ring.chats[0].template_args == {"enable_thinking": False}


async def test_messages_json_and_calls_are_a_state() -> None:
    ring = WordRing()
    given: Any = [
        {"role": "system", "content": "Be strict."},
        {"role": "user", "content": [
            {"type": "input_text", "text": "Look: "}, {"type": "input_json", "data": {"a": [1]}},
        ]},
        {"role": "assistant", "content": "Seen."},
    ]  # fmt: skip
    async with gateway_before(ring) as (_, gateway):
        body = {"input": given, "questions": [{"type": "predicate", "instructions": {"b": 2}}]}
        answer = await send(gateway, "/v1/decisions", body)
    assert answer.status == 200, answer.text
    (prompt,) = ring.prompts
    assert prompt.startswith(
        'system: Be strict.\nuser: Look: {"a": [1]}\nassistant: Seen.\nuser: Is this'
    )


async def test_system_one_has_names_in_place_of_places() -> None:
    questions = {
        "truth": {"type": "noul", "criteria": {"true": "It is so."}},
        "place": {"type": "choice", "criteria": {"Paris": None, "New York": "a city"}},
    }
    async with gateway_before(WordRing()) as (_, gateway):
        body = {"model": "tiny", "state": {"text": "state"}, "questions": questions}
        answer = await send(gateway, "/v1/systemone", body)
    assert answer.status == 200, answer.text
    assert answer.body["answers"]["truth"]["noul"] == pytest.approx(0.75)
    assert answer.body["answers"]["truth"]["diagnostics"]["label_mass"] == pytest.approx(0.4)
    place = answer.body["answers"]["place"]
    assert place["choice"] == "Paris"
    assert place["probabilities"] == pytest.approx({"Paris": 0.8, "New York": 0.2})
    assert answer.body["usage"]["output_tokens"] == 0


async def test_system_one_takes_a_single_label_but_not_none() -> None:
    alone = {"a": {"type": "score", "instructions": "x", "criteria": ["Paris"]}}
    async with gateway_before(WordRing()) as (_, gateway):
        answer = await send(gateway, "/v1/systemone", {"state": "a", "questions": alone})
        none = {"a": {"type": "choice", "criteria": {}}}
        refused = await send(gateway, "/v1/systemone", {"state": "a", "questions": none})
        listed = await send(gateway, "/v1/models", **{"X-TypeSafe-SDK": "1"})
    assert answer.body["answers"]["a"]["probabilities"] == {"0": 1.0}
    assert answer.body["answers"]["a"]["diagnostics"]["label_mass"] < 1
    assert "questions.a.criteria has 0 entries" in refused.body["error"]["message"]
    (model,) = listed.body["models"]
    assert model.keys() == {"name", "description", "release_date"}


PREDICATE = {"type": "predicate", "instructions": "x"}


@pytest.mark.parametrize(
    ("questions", "words"),
    [
        ([], f"1 to {MAX_QUESTIONS}"),
        ([PREDICATE] * (MAX_QUESTIONS + 1), f"{MAX_QUESTIONS + 1} entries"),
        ([{"type": "choice", "instructions": "x", "choices": [{"value": "a"}]}], "1 entries"),
        (
            [{"type": "choice", "instructions": "x", "choices": [{"value": "a"}, {"value": "a"}]}],
            "'a' twice",
        ),
        (
            [
                {
                    "type": "choice", "instructions": "x",
                    "choices": [{"value": "true"}, {"value": True}],
                }
            ],
            "'true' twice",
        ),
        (
            [{"type": "score", "instructions": "x", "levels": [{"label": "a"}, {"label": " "}]}],
            "levels[1] is empty",
        ),
        (
            [
                {
                    "type": "choice", "instructions": "x",
                    "choices": [{"value": str(number)} for number in range(MAX_LABELS + 1)],
                }
            ],
            f"2 to {MAX_LABELS}",
        ),
        ([{"type": "box", "instructions": "x"}], "box"),
    ],
)  # fmt: skip
async def test_bad_questions_are_refused_by_name(questions: Any, words: str) -> None:
    async with gateway_before(WordRing()) as (_, gateway):
        answer = await send(gateway, "/v1/decisions", {"input": "a", "questions": questions})
    assert answer.status == 400
    assert words in answer.body["error"]["message"]


async def test_a_refusal_of_the_server_names_the_input() -> None:
    async with openai_before(WordRing()) as (client, _):
        with pytest.raises(openai.NotFoundError, match="is not served"):
            await client.decisions.create(model="other", input="a", questions=[PREDICATE])  # type: ignore[list-item]
