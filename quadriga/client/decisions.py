"""Decisions: the probabilities of the possible answers to questions about a state.

A question and its possible answers, the labels, are appended to the state. The probability of a
label is that of all of its tokens, in the model's own distribution, divided by the sum over the
labels. No token is sampled. The state is computed once: its KV pages are shared by all questions,
and those of a question by its labels.

First questions and decisions; then the requests to the server that a question needs.
"""

import asyncio
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from quadriga.client.receipts import Receipt
from quadriga.client.types import Chat, Completion, Prompt, RenderedPrompt
from quadriga.errors import InvalidRequest, PromptTooLong
from quadriga.sampling.pooling import LOGPROBS, MAX_LAST_TOKENS, Pooling
from quadriga.wire.client import ChatOptions

MAX_QUESTIONS = 400
MIN_LABELS, MAX_LABELS = 2, 255
YES, NO = "Yes", "No"


@dataclass(frozen=True, slots=True)
class Question:
    """A question about a state, and its possible answers.

        Question("The text is about a city.")                                   # yes or no
        Question("Which country is it about?", ["France", "Germany"])
        Question("How good is it?", {"bad": "", "fair": "", "good": "no mistake"})  # a scale

    Attributes:
        instructions: the question, or a statement.
        labels: the possible answers, or for each of them when it applies; of a scale in their
            order. (): yes or no.
    """

    instructions: str
    labels: Sequence[str] | Mapping[str, str] = ()


@dataclass(frozen=True, slots=True)
class Decision:
    """What a model says of the labels of a question.

    Attributes:
        probabilities: of each label, in their order, which add up to 1; {} if it is refused.
        label_mass: how much of all that the model might say the labels are, 0 to 1; where it is
            small, the probabilities say little.
        argmax_is_label: the model would write one of the labels, if it chose the likeliest token at
            every step.
        num_tokens: number of tokens of the prompts, one or more for a question.
        receipts: what the answer is a function of, for each prompt; [] unless requested.
        refusal: why the question is not answered, while others are; "": it is.
    """

    probabilities: dict[str, float]
    label_mass: float
    argmax_is_label: bool
    num_tokens: int = 0
    receipts: list[Receipt] = field(default_factory=list)
    refusal: str = ""

    @property
    def label(self) -> str:
        """The likeliest label; the first of several, and "" if the question is refused."""
        return max(self.probabilities, key=self.probabilities.__getitem__, default="")

    @property
    def confidence(self) -> float:
        """The probability of the likeliest label."""
        return max(self.probabilities.values(), default=0.0)

    @property
    def probability(self) -> float:
        """The probability of the first label: of a question without labels, that of yes."""
        return next(iter(self.probabilities.values()), 0.0)

    @property
    def score(self) -> float:
        """The mean of the labels' numbers, counted from 0, weighted by their probabilities."""
        return sum(number * each for number, each in enumerate(self.probabilities.values()))


@dataclass(frozen=True, slots=True)
class AskedQuestion:
    """A question as the model reads it.

    Attributes:
        text: what is appended to the state.
        labels: the possible answers, all different.
    """

    text: str
    labels: list[str]

    @classmethod
    def of(cls, question: Question, field: str) -> "AskedQuestion":
        """Return a question as the model reads it. `field`: name of its labels, for errors.

        Raises:
            InvalidRequest: there are too few or too many labels, or one is empty or there twice.
        """
        given = question.labels
        if not given:
            return predicate(question.instructions)
        pairs = given.items() if isinstance(given, Mapping) else ((label, "") for label in given)
        return one_of(question.instructions, list(pairs), field)


def predicate(instructions: str) -> AskedQuestion:
    """Return a question that is answered with yes or no."""
    asked = f"Is this the case, according to the above?\n{instructions}"
    return AskedQuestion(f"{asked}\n\nAnswer with {YES} or {NO} only.", [YES, NO])


def one_of(
    instructions: str,
    labels: Sequence[tuple[str, str]],
    field: str,
    min_labels: int = MIN_LABELS,
) -> AskedQuestion:
    """Return a question that is answered with one of several labels.

    Args:
        instructions: the question.
        labels: each label and its description, which may be "".
        field: name of the labels in the request, for errors.
        min_labels: the least number of labels.

    Raises:
        InvalidRequest: there are too few or too many labels, or one is empty or there twice.
    """
    names = [label for label, _ in labels]
    if not min_labels <= len(names) <= MAX_LABELS:
        raise InvalidRequest(
            f"{field} has {len(names)} entries: a question has {min_labels} to {MAX_LABELS}", field
        )
    for number, name in enumerate(names):
        if not name.strip():
            raise InvalidRequest(f"{field}[{number}] is empty: give it a text", field)
        if name in names[:number]:
            raise InvalidRequest(f"{field} has {name[:100]!r} twice: each must be different", field)
    lines = [f"- {label}: {why}" if why else f"- {label}" for label, why in labels]
    listed = "\n".join(lines)
    return AskedQuestion(
        f"{instructions}\n\nAnswer with exactly one of these, and nothing else:\n{listed}", names
    )


def check_num_questions(count: int) -> None:
    """Raise InvalidRequest for no question, or for too many."""
    if not count:
        raise InvalidRequest(
            f"questions is empty: send 1 to {MAX_QUESTIONS} questions", "questions"
        )
    if count > MAX_QUESTIONS:
        raise InvalidRequest(
            f"questions has {count} entries: a request has at most {MAX_QUESTIONS}; send several"
            " requests",
            "questions",
        )


# The requests that a question needs.

# Texts that the server encodes for a call at one time.
MAX_ENCODED_AT_ONCE = 16
# A label's tokens depend on the end of the prompt before it, not on more than its last characters.
NUM_TAIL_CHARS = 32


class LabelLogprob(NamedTuple):
    """The log-probability of a whole label, and whether each of its tokens is the likeliest."""

    value: float
    is_argmax: bool


@dataclass(frozen=True, slots=True)
class LabelRequests:
    """The requests to the server whose answers have the probabilities of a question's labels.

    Labels of a single token share the first request, any other label has its own.

    Attributes:
        question: as the model reads it.
        prompts: of each request, with what is asked of it.
        lengths: number of tokens of each label.
    """

    question: AskedQuestion
    prompts: list[tuple[Prompt, Pooling]]
    lengths: list[int]

    @classmethod
    def of(
        cls, question: AskedQuestion, start: list[int], ends: Sequence[list[int]]
    ) -> "LabelRequests":
        """Return the requests for labels.

        Args:
            question: has the labels.
            start: token ids of the prompt before them.
            ends: token ids of each label.
        """
        prompts: list[tuple[Prompt, Pooling]] = []
        if firsts := [end[0] for end in ends if len(end) == 1]:
            prompts.append((start, Pooling(LOGPROBS, token_ids=firsts, with_largest=True)))
        prompts += [
            ([*start, *end], Pooling(LOGPROBS, num_last=len(end), with_largest=True))
            for end in ends
            if len(end) > 1
        ]
        return cls(question, prompts, [len(end) for end in ends])

    def decision(self, completions: Sequence[Completion]) -> Decision:
        """Return the decision, given the completions of the prompts, in their order."""
        vectors = [list(completion.vector or ()) for completion in completions]
        logprobs = list(self._logprobs(vectors))
        highest = max(each.value for each in logprobs)
        weights = [math.exp(each.value - highest) for each in logprobs]
        total = sum(weights)
        labels = self.question.labels
        return Decision(
            {label: weight / total for label, weight in zip(labels, weights, strict=True)},
            min(1.0, total * math.exp(highest)),
            any(each.is_argmax for each in logprobs),
            sum(completion.usage.prompt_tokens for completion in completions),
            [each.receipt for each in completions if each.receipt is not None],
        )

    def _logprobs(self, vectors: list[list[float]]) -> Iterator[LabelLogprob]:
        """Yield the log-probability of each label; the largest of any token follow in a vector."""
        of_prompts = iter(vectors)
        *single, largest = next(of_prompts) if 1 in self.lengths else [0.0]
        of_single = iter(single)
        for length in self.lengths:
            if length == 1:
                value = next(of_single)
                yield LabelLogprob(value, value == largest)
            else:
                vector = next(of_prompts)
                values, most = vector[:length], vector[length:]
                yield LabelLogprob(sum(values), values == most)


class PromptEncoder(Protocol):
    """What a server says of prompts: AsyncClient."""

    async def render(self, prompt: Prompt, chat: ChatOptions = ...) -> RenderedPrompt:
        """Return the text and the token ids of a chat."""

    async def tokenize(self, prompt: Prompt) -> list[int]:
        """Return the token ids of a text."""


class LabelEncoder:
    """Makes the requests for the labels of questions about a state.

    Args:
        client: of the server.
        info: of the server.
    """

    def __init__(self, client: PromptEncoder, info: Mapping[str, Any]) -> None:
        self._client = client
        self._context = int(info["context_length"])
        self._chat = _answering_at_once(info)
        self._turns = asyncio.Semaphore(MAX_ENCODED_AT_ONCE)
        self._ids: dict[str, asyncio.Task[list[int]]] = {}

    async def encode(
        self, state: Chat, questions: Sequence[AskedQuestion]
    ) -> list[LabelRequests | InvalidRequest]:
        """Return the requests of each question, or why it is refused.

        Args:
            state: a chat, to whose end each question is appended.
            questions: the questions.

        Raises:
            InvalidRequest: every question is refused; that of the first one.
        """
        results = await asyncio.gather(
            *(self._encode_question(state, each) for each in questions), return_exceptions=True
        )
        requests: list[LabelRequests | InvalidRequest] = []
        for result in results:
            if isinstance(result, BaseException) and not isinstance(result, InvalidRequest):
                raise result
            requests.append(result)
        if all(isinstance(each, InvalidRequest) for each in requests):
            assert isinstance(requests[0], InvalidRequest)
            raise requests[0]
        return requests

    async def _encode_question(self, state: Chat, question: AskedQuestion) -> LabelRequests:
        async with self._turns:
            prompt = await self._client.render(_with_question(state, question.text), self._chat)
        labels = question.labels
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
        self._check_lengths(len(start), ends, labels)
        return LabelRequests.of(question, start, ends)

    def _check_lengths(self, num_before: int, ends: list[list[int]], labels: list[str]) -> None:
        """Raise InvalidRequest for a label, or a prompt with one, that is too long."""
        for label, end in zip(labels, ends, strict=True):
            if len(end) > MAX_LAST_TOKENS:
                raise InvalidRequest(
                    f"the label {label[:100]!r} has {len(end)} tokens: at most {MAX_LAST_TOKENS}"
                    " are scored; shorten it",
                    "questions",
                )
        num_tokens = num_before + max(map(len, ends))
        if num_tokens > self._context:
            raise PromptTooLong(
                f"input, question and label have {num_tokens} tokens, the model's context is"
                f" {self._context}; shorten them",
                "input",
            )

    async def _encoded(self, text: str) -> list[int]:
        """Return the ids of a text, which is encoded once."""
        if text not in self._ids:
            self._ids[text] = asyncio.ensure_future(self._encode_text(text))
        return await self._ids[text]

    async def _encode_text(self, text: str) -> list[int]:
        async with self._turns:
            return await self._client.tokenize(text)


def decisions_of(
    requests: Sequence[LabelRequests | InvalidRequest], completions: Sequence[Completion]
) -> list[Decision]:
    """Return the decision of each question.

    Args:
        requests: as `LabelEncoder.encode` returns them.
        completions: of all of their prompts, in order.
    """
    decisions, left = [], iter(completions)
    for each in requests:
        if isinstance(each, InvalidRequest):
            decisions.append(Decision({}, 0.0, False, refusal=str(each)))
        else:
            decisions.append(each.decision([next(left) for _ in each.prompts]))
    return decisions


def _answering_at_once(info: Mapping[str, Any]) -> ChatOptions:
    """Return the options that turn a model's reasoning off, if its template can."""
    reasoning = (info.get("answer_format") or {}).get("reasoning") or {}
    switch = reasoning.get("switch")
    return ChatOptions(template_args={switch: False}) if switch else ChatOptions()


def _with_question(state: Chat, text: str) -> Chat:
    """Return a chat that ends with a question of the user."""
    if state and state[-1]["role"] == "user":
        last = {**state[-1], "content": f"{state[-1]['content']}\n\n{text}"}
        return [*state[:-1], last]
    return [*state, {"role": "user", "content": text}]


def _num_common(ids: Sequence[int], others: Sequence[int]) -> int:
    """Return how many first ids are the same."""
    count = 0
    for one, other in zip(ids, others, strict=False):
        if one != other:
            break
        count += 1
    return count
