"""Read the answers to a chat: whole, or as a stream of parsed events."""

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from http_proc.answer.events import AnswerEvent, ParsedAnswer, ReasoningTokens
from http_proc.core.errors import ApiError
from http_proc.core.request_group import RequestGroup, tokens_of
from http_proc.core.streaming import (
    SERVER_SENT_EVENTS,
    EventSink,
    Renderer,
    StreamFraming,
    stream_events,
)
from http_proc.generation.prepare import AnswerReader, PreparedChat
from quadriga.client.types import Completion, StreamChunk
from quadriga.wire.client import Accepted


@dataclass(slots=True)
class ChatAnswer:
    """One answer: what it says, and the completion that it was parsed from.

    Attributes:
        events: the parts of `parsed` in the order in which the model wrote them.
        num_reasoning_tokens: tokens of the reasoning; None: they are not counted.
    """

    parsed: ParsedAnswer
    completion: Completion
    events: list[AnswerEvent]
    num_reasoning_tokens: int | None = None

    @property
    def finish_reason(self) -> str:
        """tool_calls, stop, length or abort."""
        return finish_reason(self.completion, bool(self.parsed.calls))


def finish_reason(completion: Completion, has_calls: bool) -> str:
    """Return tool_calls for an answer with calls that ended by itself, else the server's reason."""
    called = has_calls and completion.finish_reason == "stop"
    return "tool_calls" if called else completion.finish_reason


async def collect_chat(group: RequestGroup, prepared: PreparedChat) -> list[ChatAnswer]:
    """Return every answer, in order. Raise the first error.

    The tokens of the reasoning are counted if the request was submitted as a stream.
    """
    events_of: dict[int, list[AnswerEvent]] = {}
    tokens_of_reasoning: dict[int, ReasoningTokens] = {}
    completions: dict[int, Completion] = {}
    async for choice, events, chunk in _read(group, prepared.reader):
        events_of.setdefault(choice, []).extend(events)
        tokens_of_reasoning.setdefault(choice, ReasoningTokens()).push(events, len(chunk.token_ids))
        if chunk.completion is not None:
            completions[choice] = chunk.completion
    answers = []
    for choice, events in sorted(events_of.items()):
        parsed, tokens = ParsedAnswer(), tokens_of_reasoning[choice]
        parsed.add(events)
        is_counted = prepared.reader.separates_reasoning and tokens.is_exact
        count = tokens.count if is_counted else None
        answers.append(ChatAnswer(parsed, completions[choice], events, count))
    return answers


async def read_chat(
    group: RequestGroup, prepared: PreparedChat
) -> AsyncIterator[tuple[list[AnswerEvent], StreamChunk]]:
    """Yield the chunks of a chat with one answer, each with the events that its text has.

    Args:
        group: has the chat as its only request.
        prepared: the chat.

    Raises:
        QuadrigaError: the request has failed.
    """
    async for _, events, chunk in _read(group, prepared.reader):
        yield events, chunk


async def _read(
    group: RequestGroup, reader: AnswerReader
) -> AsyncIterator[tuple[int, list[AnswerEvent], StreamChunk]]:
    """Yield the chunks of all choices, each with its choice and the events of its text."""
    readings: dict[int, _ChoiceReading] = {}
    while not group.is_done:
        for choice, chunk in await group.next_chunks():
            if choice not in readings:
                (accepted,) = await group.accepted()
                readings[choice] = _ChoiceReading(group, choice, reader, accepted.prompt_end)
            events = readings[choice].push(chunk)
            if chunk.completion is not None:
                group.note(chunk.completion)
            yield choice, events, chunk


class _ChoiceReading:
    """Parse the chunks of one choice, and end it at a call that repeats an earlier one.

    What the server has generated behind such a call is cut off, so that the answer is a function of
    its tokens alone.
    """

    def __init__(
        self, group: RequestGroup, choice: int, reader: AnswerReader, prompt_end: str
    ) -> None:
        self._group = group
        self._choice = choice
        self._parser = reader.parser(prompt_end)
        self._ends_at_repeat = reader.ends_at_repeat
        self._num_tokens = self._num_chars = 0

    @property
    def is_over(self) -> bool:
        """Whether the answer has ended at a repeat, before the server has ended it."""
        return self._parser.is_over

    def push(self, chunk: StreamChunk) -> list[AnswerEvent]:
        """Return the events of the next chunk; what is behind a repeat is removed from it."""
        if self._ends_at_repeat:
            events = self._push_tokens(chunk)
        else:
            events = self._parser.push(chunk.text) if chunk.text else []
        if chunk.completion is not None:
            events += self._parser.finish()
            if self.is_over:
                self._cut_completion(chunk.completion)
        return events

    def _push_tokens(self, chunk: StreamChunk) -> list[AnswerEvent]:
        """Parse a chunk token by token, up to the token that completes a repeat."""
        if self.is_over:
            _cut(chunk, 0, 0)
            return []
        num_tokens = num_chars = 0
        events: list[AnswerEvent] = []
        for piece in tokens_of(chunk):
            events += self._parser.push(piece.text) if piece.text else []
            num_tokens, num_chars = num_tokens + len(piece.token_ids), num_chars + len(piece.text)
            if self.is_over:
                _cut(chunk, num_tokens, num_chars)
                if chunk.completion is None:
                    self._group.end_choice(self._choice)
                break
        self._num_tokens += num_tokens
        self._num_chars += num_chars
        return events

    def _cut_completion(self, completion: Completion) -> None:
        num_tokens = self._num_tokens
        completion.finish_reason, completion.matched_stop = "stop", None
        completion.text = completion.text[: self._num_chars]
        completion.token_ids = completion.token_ids[:num_tokens]
        if completion.logprobs is not None:
            completion.logprobs = completion.logprobs[:num_tokens]
        completion.timings.token_times = completion.timings.token_times[:num_tokens]
        completion.usage = msgspec.structs.replace(completion.usage, completion_tokens=num_tokens)


def _cut(chunk: StreamChunk, num_tokens: int, num_chars: int) -> None:
    """Remove what follows the first tokens of a chunk."""
    chunk.text, chunk.token_ids = chunk.text[:num_chars], chunk.token_ids[:num_tokens]
    chunk.token_times = chunk.token_times[:num_tokens]
    if chunk.logprobs is not None:
        chunk.logprobs = chunk.logprobs[:num_tokens]
    if chunk.text_lengths is not None:
        chunk.text_lengths = chunk.text_lengths[:num_tokens]


class ChatRenderer(Protocol):
    """Format the answers to a chat as the events of an API's stream.

    Attributes:
        framing: how the events are sent.
    """

    framing: StreamFraming = SERVER_SENT_EVENTS

    def start(self, num_prompt_tokens: int, num_kept: int = 0, /) -> bytes:  # noqa: ARG002
        """Return the events that come before all others.

        num_kept: tokens of the prompt that stay in the prefix cache, as the request asks.
        """
        return b""

    def render(self, choice: int, events: list[AnswerEvent], chunk: StreamChunk, /) -> bytes:
        """Return the events of a chunk; `events` is what the parser read from its text.

        The last chunk of a choice has `completion`; the parser is then at its end.
        """

    def finish(self) -> bytes:
        """Return the events that follow the last chunk of all choices."""
        return b""

    def error(self, error: ApiError) -> bytes:
        """Return the events that end the stream with an error."""


async def stream_chat(
    sink: EventSink,
    group: RequestGroup,
    prepared: PreparedChat,
    renderer: ChatRenderer,
    last: Callable[[], Awaitable[bytes]] | None = None,
) -> None:
    """Send the answers as a stream of parsed events. `last`: as `stream_events`."""
    await stream_events(sink, group, _ParsingRenderer(renderer, prepared.reader, group), last)


class _ParsingRenderer(Renderer):
    """A Renderer that parses the answers and gives the events to a ChatRenderer.

    A choice that ends at a repeated call has its last events at the end of the stream: when the
    server has ended it depends on more than its tokens.
    """

    def __init__(self, renderer: ChatRenderer, reader: AnswerReader, group: RequestGroup) -> None:
        self.framing = renderer.framing
        self._renderer = renderer
        self._reader = reader
        self._group = group
        self._prompt_end = ""
        self._choices: dict[int, _ChoiceReading] = {}
        self._last_chunks: dict[int, tuple[list[AnswerEvent], StreamChunk]] = {}

    def start(self, accepted: Sequence[Accepted]) -> bytes:
        """Return the first events of the stream."""
        (of_prompt,) = accepted
        self._prompt_end = of_prompt.prompt_end
        return self._renderer.start(of_prompt.num_prompt_tokens, of_prompt.num_kept)

    def render(self, choice: int, chunk: StreamChunk) -> bytes:
        """Return the events of a chunk."""
        reading = self._choices.get(choice)
        if reading is None:
            reading = _ChoiceReading(self._group, choice, self._reader, self._prompt_end)
            self._choices[choice] = reading
        was_over = reading.is_over
        events = reading.push(chunk)
        if reading.is_over and chunk.completion is not None:
            self._last_chunks[choice] = events, chunk
            return b""
        return b"" if was_over else self._renderer.render(choice, events, chunk)

    def finish(self) -> bytes:
        """Return the last events of the stream."""
        last = (self._renderer.render(c, *self._last_chunks[c]) for c in sorted(self._last_chunks))
        return b"".join(last) + self._renderer.finish()

    def error(self, error: ApiError) -> bytes:
        """Return the events that end the stream with an error."""
        return self._renderer.error(error)
