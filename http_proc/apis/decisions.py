"""Decisions: the probabilities of answers to typed questions, in OpenAI's format and System One's.

How a probability is made is in quadriga/client/decisions.py. First the bodies, whose docstrings are
the descriptions in /openapi.json; then what both endpoints share, and the two endpoints.
"""

import json
from collections.abc import Sequence
from typing import Any

import msgspec

from http_proc.apis.responses.input import chat_turns, parse_items, with_type
from http_proc.core.call import Call
from http_proc.core.errors import from_server, invalid
from http_proc.core.gateway import Gateway
from http_proc.core.served_model import ServedModel
from http_proc.core.streaming import EventSink
from http_proc.generation.sampling import convert
from http_proc.generation.schema import CacheSalt, Priority, RequestBody
from http_proc.generation.vectors import vectors
from http_proc.web.endpoint import answering
from quadriga.client.async_client import RequestOptions
from quadriga.client.decisions import (
    MIN_LABELS,
    NO,
    YES,
    AskedQuestion,
    Decision,
    LabelEncoder,
    LabelRequests,
    check_num_questions,
    decisions_of,
    one_of,
    predicate,
)
from quadriga.client.receipts import Receipt
from quadriga.client.types import Chat, Completion
from quadriga.errors import QuadrigaError

NAMES = {"prompt": "input", "prompt_token_ids": "input"}
# Parts of instructions, and the field that has what the model reads.
PARTS = {"input_text": "text", "input_json": "data"}

MIN_CRITERIA = 1  # System One takes a single label, whose probability is 1

JsonText = str | dict[str, Any] | list[Any]


class DecisionChoice(RequestBody, kw_only=True):
    """A possible answer, and when it applies."""

    value: str | bool
    description: str = ""


class DecisionLevel(RequestBody, kw_only=True):
    """A level of a scale, and when it applies."""

    label: str
    description: str = ""


class PredicateQuestion(RequestBody, kw_only=True, tag="predicate", tag_field="type"):
    """How likely is a statement about the input true?"""

    instructions: JsonText
    name: str | None = None


class ChoiceQuestion(RequestBody, kw_only=True, tag="choice", tag_field="type"):
    """Which of 2 to 255 choices holds for the input?"""

    instructions: JsonText
    choices: list[DecisionChoice]
    name: str | None = None


class ScoreQuestion(RequestBody, kw_only=True, tag="score", tag_field="type"):
    """Which of the ordered levels, numbered from 0 on, does the input have?"""

    instructions: JsonText
    levels: list[DecisionLevel]
    name: str | None = None


class DecisionRequest(RequestBody, kw_only=True):
    """POST /v1/decisions, in OpenAI's format.

    input: a text, or messages and calls as in /v1/responses, whose content may have parts of the
    type input_json. questions: 1 to 400. cache_salt: what is cached of the input is shared with no
    request of another salt. receipt: answers have receipts. The fields after receipt have no
    effect: prefixes are always shared.
    """

    input: str | list[dict[str, Any]]
    questions: list[PredicateQuestion | ChoiceQuestion | ScoreQuestion]
    model: str | None = None
    priority: Priority = 0
    cache_salt: CacheSalt | None = None
    receipt: bool = False
    prompt_cache_key: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    safety_identifier: str | None = None


class Probability(msgspec.Struct, omit_defaults=True):
    """The probability of a choice's value, or of a level's value and label."""

    value: str | bool | int
    probability: float
    label: str | None = None


class DecisionAnswer(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The answer to one question.

    type: predicate, choice, score or refusal. label_mass: how much of the model's distribution its
    possible answers have together, 0 to 1; where it is small, the probabilities say little.
    argmax_is_label: the model would write one of them, if it chose the likeliest token at every
    step. refusal: why the question has no answer, where others have one. receipts: of each of its
    prompts.
    """

    type: str
    name: str | None = None
    probability: float | None = None
    choice: str | bool | None = None
    score: float | None = None
    confidence: float | None = None
    probabilities: list[Probability] | None = None
    label_mass: float | None = None
    argmax_is_label: bool | None = None
    refusal: str | None = None
    receipts: list[Receipt] | None = None


class InputDetails(msgspec.Struct):
    """Input tokens that came from the prefix cache."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputDetails(msgspec.Struct):
    """There is no reasoning."""

    reasoning_tokens: int = 0


class DecisionUsage(msgspec.Struct):
    """Tokens of all questions, each with the state before it."""

    input_tokens: int
    input_tokens_details: InputDetails
    total_tokens: int
    output_tokens: int = 0
    output_tokens_details: OutputDetails = msgspec.field(default_factory=OutputDetails)


class DecisionResponse(msgspec.Struct):
    """The answers, in the order of the questions."""

    answers: list[DecisionAnswer]
    model: str
    usage: DecisionUsage
    object: str = "decision"


class NoulCriteria(RequestBody, kw_only=True):
    """What counts as yes, and what as no."""

    true: JsonText | None = None
    false: JsonText | None = None


class NoulQuestion(RequestBody, kw_only=True, tag="noul", tag_field="type"):
    """Yes or no?"""

    instructions: JsonText | None = None
    criteria: NoulCriteria | None = None


class SystemOneChoice(RequestBody, kw_only=True, tag="choice", tag_field="type"):
    """Which of the named choices? criteria: when each applies, by name."""

    criteria: dict[str, JsonText | None]
    instructions: JsonText | None = None


class SystemOneScore(RequestBody, kw_only=True, tag="score", tag_field="type"):
    """Which level? criteria: the levels, numbered from 0 on."""

    criteria: list[JsonText]
    instructions: JsonText | None = None


class SystemOneRequest(RequestBody, kw_only=True):
    """POST /v1/systemone: typed questions about a state, by names of the caller's choice.

    cache_salt, receipt: as in /v1/decisions.
    """

    state: JsonText
    questions: dict[str, NoulQuestion | SystemOneChoice | SystemOneScore]
    model: str | None = None
    priority: Priority = 0
    cache_salt: CacheSalt | None = None
    receipt: bool = False


class SystemOneUsage(msgspec.Struct):
    """Tokens of all questions, each with the state before it."""

    input_tokens: int
    output_tokens: int = 0


class SystemOneAnswers(msgspec.Struct):
    """The answers, by the names of the questions."""

    model: str
    answers: dict[str, dict[str, Any]]
    usage: SystemOneUsage


# What both endpoints share.


def as_text(value: JsonText | None) -> str:
    """Return a text as it is, and anything else as compact JSON."""
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


async def decide(
    gateway: Gateway,
    model: ServedModel,
    call: Call,
    state: Chat,
    questions: Sequence[AskedQuestion],
    fields: DecisionRequest | SystemOneRequest,
) -> tuple[list[Decision], list[Completion]]:
    """Return the decision of each question, and the completions behind them.

    Args:
        gateway: its state.
        model: answers the questions.
        call: what is answered.
        state: a chat, to whose end each question is appended.
        questions: the questions.
        fields: of the request.

    Raises:
        ApiError: there are no or too many questions, or the server refuses all of them.
    """
    options: RequestOptions = {
        "priority": fields.priority,
        "cache_salt": fields.cache_salt or "",
    }
    try:
        check_num_questions(len(questions))
        encoder = LabelEncoder(model.client, await model.server_info.static())
        requests = await encoder.encode(state, questions)
    except QuadrigaError as error:
        raise from_server(error, NAMES) from None
    asked = [
        prompt for each in requests if isinstance(each, LabelRequests) for prompt in each.prompts
    ]
    answer_id = model.head(call, "dec").id
    completions = await vectors(
        gateway, model, call, answer_id, asked, options, NAMES, fields.receipt
    )
    return decisions_of(requests, completions), completions


# The endpoints.


async def decisions(gateway: Gateway, call: Call, _: EventSink) -> DecisionResponse:
    """Answer questions about an input, in OpenAI's format."""
    fields = convert(await call.parse(), DecisionRequest)
    model = gateway.served(fields.model, call.record)
    asked = [_asked(number, question) for number, question in enumerate(fields.questions)]
    state = _state_of(fields.input)
    decided, completions = await decide(gateway, model, call, state, asked, fields)
    answers = [_answer(*each) for each in zip(fields.questions, decided, strict=True)]
    num_tokens = sum(each.num_tokens for each in decided)
    cached = InputDetails(sum(completion.usage.cached_tokens for completion in completions))
    return DecisionResponse(answers, model.name, DecisionUsage(num_tokens, cached, num_tokens))


def _state_of(given: str | list[dict[str, Any]]) -> Chat:
    """Return the chat of an input. Raises ApiError."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    items = [with_type(_with_json_as_text(item)) for item in given]
    return chat_turns(None, parse_items(items))


def _with_json_as_text(item: dict[str, Any]) -> dict[str, Any]:
    """Return an item whose content has JSON as text."""
    content = item.get("content")
    if not isinstance(content, list):
        return item
    parts = [
        {"type": "input_text", "text": as_text(part.get("data"))}
        if isinstance(part, dict) and part.get("type") == "input_json"
        else part
        for part in content
    ]
    return {**item, "content": parts}


def _asked(
    number: int, question: PredicateQuestion | ChoiceQuestion | ScoreQuestion
) -> AskedQuestion:
    """Return a question as the model reads it. Raises ApiError."""
    instructions = _instructions(question.instructions, f"questions[{number}].instructions")
    match question:
        case PredicateQuestion():
            return predicate(instructions)
        case ChoiceQuestion():
            labels = [(_label_of(each.value), each.description) for each in question.choices]
            return _one_of(instructions, labels, f"questions[{number}].choices")
        case ScoreQuestion():
            labels = [(each.label, each.description) for each in question.levels]
            return _one_of(instructions, labels, f"questions[{number}].levels")


def _instructions(given: JsonText, field: str) -> str:
    """Return the text of instructions, which may be a list of parts. Raises ApiError."""
    if not isinstance(given, list) or not given or not all(map(_is_part, given)):
        return as_text(given)
    for number, part in enumerate(given):
        if part["type"] not in PARTS:
            raise invalid(
                f"{field}[{number}].type is {part['type']!r}: it must be one of {', '.join(PARTS)}",
                field,
            )
    return "\n".join(as_text(part.get(PARTS[part["type"]])) for part in given)


def _is_part(value: Any) -> bool:
    return isinstance(value, dict) and str(value.get("type", "")).startswith("input_")


def _one_of(
    instructions: str,
    labels: Sequence[tuple[str, str]],
    field: str,
    min_labels: int = MIN_LABELS,
) -> AskedQuestion:
    """Return a question that is answered with one of several labels. Raises ApiError."""
    try:
        return one_of(instructions, labels, field, min_labels)
    except QuadrigaError as error:
        raise from_server(error, {}) from None


def _label_of(value: str | bool) -> str:
    return value if isinstance(value, str) else str(value).lower()


def _answer(
    question: PredicateQuestion | ChoiceQuestion | ScoreQuestion, decision: Decision
) -> DecisionAnswer:
    if decision.refusal:
        return DecisionAnswer(type="refusal", name=question.name, refusal=decision.refusal)
    each = list(decision.probabilities.values())
    common: dict[str, Any] = {
        "name": question.name, "label_mass": decision.label_mass,
        "argmax_is_label": decision.argmax_is_label, "receipts": decision.receipts or None,
    }  # fmt: skip
    match question:
        case PredicateQuestion():
            return DecisionAnswer(type="predicate", probability=decision.probability, **common)
        case ChoiceQuestion():
            values = [choice.value for choice in question.choices]
            best = list(decision.probabilities).index(decision.label)
            listed = [Probability(*pair) for pair in zip(values, each, strict=True)]
            return DecisionAnswer(
                type="choice", choice=values[best], confidence=decision.confidence,
                probabilities=listed, **common,
            )  # fmt: skip
        case ScoreQuestion():
            levels = [
                Probability(number, probability, level.label)
                for number, (level, probability) in enumerate(
                    zip(question.levels, each, strict=True)
                )
            ]
            return DecisionAnswer(
                type="score", score=decision.score, confidence=decision.confidence,
                probabilities=levels, **common,
            )  # fmt: skip


async def system_one(gateway: Gateway, call: Call, _: EventSink) -> SystemOneAnswers:
    """Answer questions about a state, in System One's format."""
    fields = convert(await call.parse(), SystemOneRequest)
    model = gateway.served(fields.model, call.record)
    asked = [_asked_by_name(name, question) for name, question in fields.questions.items()]
    state: Chat = [{"role": "user", "content": as_text(fields.state)}]
    decided, _completions = await decide(gateway, model, call, state, asked, fields)
    answers = {
        name: _named_answer(question, each)
        for (name, question), each in zip(fields.questions.items(), decided, strict=True)
    }
    usage = SystemOneUsage(sum(each.num_tokens for each in decided))
    return SystemOneAnswers(model.name, answers, usage)


def _asked_by_name(
    name: str, question: NoulQuestion | SystemOneChoice | SystemOneScore
) -> AskedQuestion:
    """Return a question as the model reads it. Raises ApiError."""
    instructions, field = as_text(question.instructions), f"questions.{name}.criteria"
    match question:
        case NoulQuestion():
            criteria = question.criteria or NoulCriteria()
            reasons = ((YES, criteria.true), (NO, criteria.false))
            lines = [f"{label}: {as_text(why)}" for label, why in reasons if why is not None]
            if not instructions and not lines:
                raise invalid(f"questions.{name} has neither instructions nor criteria", field)
            return predicate("\n".join(filter(None, (instructions, *lines))))
        case SystemOneChoice():
            labels = [(label, as_text(why)) for label, why in question.criteria.items()]
            return _one_of(instructions, labels, field, MIN_CRITERIA)
        case SystemOneScore():
            levels = [(str(number), as_text(why)) for number, why in enumerate(question.criteria)]
            return _one_of(instructions, levels, field, MIN_CRITERIA)


def _named_answer(
    question: NoulQuestion | SystemOneChoice | SystemOneScore, decision: Decision
) -> dict[str, Any]:
    if decision.refusal:
        return {"type": "refusal", "refusal": decision.refusal}
    diagnostics: dict[str, Any] = {
        "label_mass": decision.label_mass, "argmax_is_label": decision.argmax_is_label,
    }  # fmt: skip
    common: dict[str, Any] = {"diagnostics": diagnostics}
    if decision.receipts:
        common["receipts"] = decision.receipts
    probabilities, confidence = decision.probabilities, decision.confidence
    match question:
        case NoulQuestion():
            return {"type": "noul", "noul": decision.probability, **common}
        case SystemOneChoice():
            return {
                "type": "choice", "choice": decision.label, "confidence": confidence,
                "probabilities": probabilities, **common,
            }  # fmt: skip
        case SystemOneScore():
            return {
                "type": "score", "score": decision.score, "confidence": confidence,
                "legend": dict(zip(probabilities, question.criteria, strict=True)),
                "probabilities": probabilities, **common,
            }  # fmt: skip


DECISION_ENDPOINTS = [
    answering("/v1/decisions", decisions, "Probabilities of answers to typed questions",
              DecisionRequest, DecisionResponse),
    answering("/v1/systemone", system_one, "The same, in System One's format",
              SystemOneRequest, SystemOneAnswers),
]  # fmt: skip
