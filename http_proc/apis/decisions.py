"""Decisions: the probabilities of answers to typed questions, in OpenAI's format and System One's.

A question and its possible answers, the labels, are appended to the state. The probability of a
label is that of all of its tokens, in the model's own distribution, divided by the sum over the
labels. No token is sampled. The state is computed once: its KV pages are shared by all questions.

First the bodies, whose docstrings are the descriptions in /openapi.json; then the questions, their
labels and scores, and the two endpoints.
"""

import asyncio
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from http_proc.apis.responses.input import chat_turns, parse_items, with_type
from http_proc.core.call import Call
from http_proc.core.errors import invalid
from http_proc.core.gateway import Gateway
from http_proc.core.served_model import ServedModel
from http_proc.core.streaming import EventSink
from http_proc.generation.sampling import convert
from http_proc.generation.schema import Priority, RequestBody
from http_proc.generation.vectors import vectors
from http_proc.web.endpoint import answering
from quadriga.client.async_client import RequestOptions
from quadriga.client.types import Chat, Completion, Prompt
from quadriga.sampling.pooling import LOGPROBS, MAX_LAST_TOKENS, Pooling

MAX_QUESTIONS = 400
MIN_CHOICES, MAX_CHOICES = 2, 255
# Texts that the server encodes for a call at one time.
MAX_ENCODED_AT_ONCE = 16
# A label's tokens depend on the end of the prompt before it, not on more than its last characters.
NUM_TAIL_CHARS = 32
YES, NO = "Yes", "No"
NAMES = {"prompt": "input", "prompt_token_ids": "input"}

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
    type input_json. questions: 1 to 400. The fields after priority have no effect: prefixes are
    always shared.
    """

    input: str | list[dict[str, Any]]
    questions: list[PredicateQuestion | ChoiceQuestion | ScoreQuestion]
    model: str | None = None
    priority: Priority = 0
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

    type: predicate, choice or score. label_mass: how much of the model's distribution its possible
    answers have together, 0 to 1; where it is small, the probabilities say little.
    """

    type: str
    name: str | None = None
    probability: float | None = None
    choice: str | bool | None = None
    score: float | None = None
    confidence: float | None = None
    probabilities: list[Probability] | None = None
    label_mass: float


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


class Decision(msgspec.Struct):
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
    """POST /v1/systemone: typed questions about a state, by names of the caller's choice."""

    state: JsonText
    questions: dict[str, NoulQuestion | SystemOneChoice | SystemOneScore]
    model: str | None = None
    priority: Priority = 0


class SystemOneUsage(msgspec.Struct):
    """Tokens of all questions, each with the state before it."""

    input_tokens: int
    output_tokens: int = 0


class SystemOneAnswers(msgspec.Struct):
    """The answers, by the names of the questions."""

    model: str
    answers: dict[str, dict[str, Any]]
    usage: SystemOneUsage


# Questions, and the scores of their labels.


@dataclass(frozen=True, slots=True)
class AskedQuestion:
    """A question as the model reads it.

    Attributes:
        text: what is appended to the state.
        labels: the possible answers, at least two, all different.
    """

    text: str
    labels: list[str]


@dataclass(frozen=True, slots=True)
class LabelScores:
    """What the model says of the labels of a question.

    Attributes:
        probabilities: of each label, which add up to 1.
        mass: the sum of the labels' own probabilities.
    """

    probabilities: list[float]
    mass: float

    @classmethod
    def of(cls, logprobs: Sequence[float]) -> "LabelScores":
        """Return the scores of labels with these log-probabilities."""
        highest = max(logprobs)
        weights = [math.exp(logprob - highest) for logprob in logprobs]
        total = sum(weights)
        return cls([weight / total for weight in weights], min(1.0, total * math.exp(highest)))

    @property
    def best(self) -> int:
        """Number of the likeliest label; the first of several."""
        return self.probabilities.index(max(self.probabilities))

    @property
    def expected(self) -> float:
        """The mean of the labels' numbers, weighted by their probabilities."""
        return sum(number * each for number, each in enumerate(self.probabilities))


def predicate(instructions: str) -> AskedQuestion:
    """Return a question that is answered with yes or no."""
    return AskedQuestion(f"{instructions}\n\nAnswer with {YES} or {NO} only.", [YES, NO])


def one_of(instructions: str, labels: Sequence[tuple[str, str]], field: str) -> AskedQuestion:
    """Return a question that is answered with one of several labels.

    Args:
        instructions: the question.
        labels: each label and its description, which may be "".
        field: name of the labels in the request, for errors.

    Raises:
        ApiError: there are too few or too many labels, or one is empty or there twice.
    """
    names = [label for label, _ in labels]
    if not MIN_CHOICES <= len(names) <= MAX_CHOICES:
        raise invalid(
            f"{field} has {len(names)} entries: a question has {MIN_CHOICES} to {MAX_CHOICES}",
            field,
        )
    for number, name in enumerate(names):
        if not name.strip():
            raise invalid(f"{field}[{number}] is empty: give it a text", field)
        if name in names[:number]:
            raise invalid(f"{field} has {name[:100]!r} twice: each must be different", field)
    lines = [f"- {label}: {why}" if why else f"- {label}" for label, why in labels]
    listed = "\n".join(lines)
    return AskedQuestion(
        f"{instructions}\n\nAnswer with exactly one of these, and nothing else:\n{listed}", names
    )


def as_text(value: JsonText | None) -> str:
    """Return a text as it is, and anything else as compact JSON."""
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


async def score_labels(
    gateway: Gateway,
    model: ServedModel,
    call: Call,
    state: Chat,
    questions: Sequence[AskedQuestion],
    options: RequestOptions,
) -> tuple[list[LabelScores], list[Completion]]:
    """Return the scores of the labels of each question, and the completions behind them.

    Args:
        gateway: its state.
        model: answers the questions.
        call: what is answered.
        state: a chat, to whose end each question is appended.
        questions: the questions.
        options: of each request to the server.

    Raises:
        ApiError: there are no or too many questions, or the server refuses one.
    """
    if not 1 <= len(questions) <= MAX_QUESTIONS:
        raise invalid(
            f"questions has {len(questions)} entries: 1 to {MAX_QUESTIONS} are answered; send"
            " several requests",
            "questions",
        )
    encoder = _LabelEncoder(model)
    encoded = await asyncio.gather(
        *(encoder.encode(_with_question(state, each.text), each.labels) for each in questions)
    )
    asked: list[tuple[Prompt, Pooling]] = [request for each in encoded for request in each]
    answer_id = model.head(call, "dec").id
    completions = await vectors(gateway, model, call, answer_id, asked, options, NAMES)
    scores, first = [], 0
    for requests in encoded:
        found = completions[first : first + len(requests)]
        first += len(requests)
        sums = [sum(completion.vector or ()) for completion in found]
        scores.append(LabelScores.of(list(found[0].vector or ()) if len(found) == 1 else sums))
    return scores, completions


def _with_question(state: Chat, text: str) -> Chat:
    """Return a chat that ends with a question of the user."""
    if state and state[-1]["role"] == "user":
        last = {**state[-1], "content": f"{state[-1]['content']}\n\n{text}"}
        return [*state[:-1], last]
    return [*state, {"role": "user", "content": text}]


class _LabelEncoder:
    """Makes the requests whose vectors are the log-probabilities of labels after a prompt."""

    def __init__(self, model: ServedModel) -> None:
        self._client = model.client
        self._turns = asyncio.Semaphore(MAX_ENCODED_AT_ONCE)
        self._ids: dict[str, asyncio.Task[list[int]]] = {}

    async def encode(self, chat: Chat, labels: list[str]) -> list[tuple[Prompt, Pooling]]:
        """Return one request if every label is a single token, else one for each label."""
        async with self._turns:
            prompt = await self._client.render(chat)
        tail = prompt.text[-NUM_TAIL_CHARS:]
        before = await self._encoded(tail)
        each = [await self._encoded(tail + label) for label in labels]
        if any(ids[: len(before)] != before or len(ids) == len(before) for ids in each):
            # A label changes the tokens of what is before it.
            before = prompt.token_ids
            each = [await self._encoded(prompt.text + label) for label in labels]
        kept = min(_num_common(ids, before) for ids in each)
        start = prompt.token_ids[: len(prompt.token_ids) - (len(before) - kept)]
        ends = [ids[kept:] for ids in each]
        if all(len(end) == 1 for end in ends):
            return [(start, Pooling(LOGPROBS, token_ids=[end[0] for end in ends]))]
        for label, end in zip(labels, ends, strict=True):
            if len(end) > MAX_LAST_TOKENS:
                raise invalid(
                    f"the label {label[:100]!r} has {len(end)} tokens: at most {MAX_LAST_TOKENS}"
                    " are scored; shorten it",
                    "questions",
                )
        return [([*start, *end], Pooling(LOGPROBS, num_last=len(end))) for end in ends]

    async def _encoded(self, text: str) -> list[int]:
        """Return the ids of a text, which is encoded once."""
        if text not in self._ids:
            self._ids[text] = asyncio.ensure_future(self._encode(text))
        return await self._ids[text]

    async def _encode(self, text: str) -> list[int]:
        async with self._turns:
            return await self._client.tokenize(text)


def _num_common(ids: Sequence[int], others: Sequence[int]) -> int:
    """Return how many first ids are the same."""
    count = 0
    for one, other in zip(ids, others, strict=False):
        if one != other:
            break
        count += 1
    return count


# The endpoints.


async def decisions(gateway: Gateway, call: Call, _: EventSink) -> Decision:
    """Answer questions about an input, in OpenAI's format."""
    fields = convert(await call.parse(), DecisionRequest)
    model = gateway.served(fields.model, call.record)
    asked = [_asked(number, question) for number, question in enumerate(fields.questions)]
    state = _state_of(fields.input)
    scores, completions = await score_labels(
        gateway, model, call, state, asked, {"priority": fields.priority}
    )
    answers = [_answer(*each) for each in zip(fields.questions, scores, strict=True)]
    num_tokens = sum(completion.usage.prompt_tokens for completion in completions)
    cached = InputDetails(sum(completion.usage.cached_tokens for completion in completions))
    return Decision(answers, model.name, DecisionUsage(num_tokens, cached, num_tokens))


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
    instructions = as_text(question.instructions)
    match question:
        case PredicateQuestion():
            return predicate(instructions)
        case ChoiceQuestion():
            labels = [(_label_of(each.value), each.description) for each in question.choices]
            return one_of(instructions, labels, f"questions[{number}].choices")
        case ScoreQuestion():
            labels = [(each.label, each.description) for each in question.levels]
            return one_of(instructions, labels, f"questions[{number}].levels")


def _label_of(value: str | bool) -> str:
    return value if isinstance(value, str) else str(value).lower()


def _answer(
    question: PredicateQuestion | ChoiceQuestion | ScoreQuestion, scores: LabelScores
) -> DecisionAnswer:
    best, each = scores.best, scores.probabilities
    common: dict[str, Any] = {"name": question.name, "label_mass": scores.mass}
    match question:
        case PredicateQuestion():
            return DecisionAnswer(type="predicate", probability=each[0], **common)
        case ChoiceQuestion():
            values = [choice.value for choice in question.choices]
            listed = [Probability(*pair) for pair in zip(values, each, strict=True)]
            return DecisionAnswer(
                type="choice", choice=values[best], confidence=each[best], probabilities=listed,
                **common,
            )  # fmt: skip
        case ScoreQuestion():
            levels = [
                Probability(number, probability, level.label)
                for number, (level, probability) in enumerate(
                    zip(question.levels, each, strict=True)
                )
            ]
            return DecisionAnswer(
                type="score", score=scores.expected, confidence=each[best], probabilities=levels,
                **common,
            )  # fmt: skip


async def system_one(gateway: Gateway, call: Call, _: EventSink) -> SystemOneAnswers:
    """Answer questions about a state, in System One's format."""
    fields = convert(await call.parse(), SystemOneRequest)
    model = gateway.served(fields.model, call.record)
    asked = [_asked_by_name(name, question) for name, question in fields.questions.items()]
    state: Chat = [{"role": "user", "content": as_text(fields.state)}]
    scores, completions = await score_labels(
        gateway, model, call, state, asked, {"priority": fields.priority}
    )
    answers = {
        name: _named_answer(question, each)
        for (name, question), each in zip(fields.questions.items(), scores, strict=True)
    }
    num_tokens = sum(completion.usage.prompt_tokens for completion in completions)
    return SystemOneAnswers(model.name, answers, SystemOneUsage(num_tokens))


def _asked_by_name(
    name: str, question: NoulQuestion | SystemOneChoice | SystemOneScore
) -> AskedQuestion:
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
            return one_of(
                instructions, [(k, as_text(v)) for k, v in question.criteria.items()], field
            )
        case SystemOneScore():
            levels = [(str(number), as_text(why)) for number, why in enumerate(question.criteria)]
            return one_of(instructions, levels, field)


def _named_answer(
    question: NoulQuestion | SystemOneChoice | SystemOneScore, scores: LabelScores
) -> dict[str, Any]:
    best, each = scores.best, scores.probabilities
    diagnostics = {"diagnostics": {"label_mass": scores.mass}}
    match question:
        case NoulQuestion():
            return {"type": "noul", "noul": each[0], **diagnostics}
        case SystemOneChoice():
            names = list(question.criteria)
            probabilities = dict(zip(names, each, strict=True))
            return {
                "type": "choice", "choice": names[best], "confidence": each[best],
                "probabilities": probabilities, **diagnostics,
            }  # fmt: skip
        case SystemOneScore():
            numbers = [str(number) for number in range(len(each))]
            return {
                "type": "score", "score": scores.expected, "confidence": each[best],
                "legend": dict(zip(numbers, question.criteria, strict=True)),
                "probabilities": dict(zip(numbers, each, strict=True)), **diagnostics,
            }  # fmt: skip


DECISION_ENDPOINTS = [
    answering("/v1/decisions", decisions, "Probabilities of answers to typed questions",
              DecisionRequest, Decision),
    answering("/v1/systemone", system_one, "The same, in System One's format",
              SystemOneRequest, SystemOneAnswers),
]  # fmt: skip
