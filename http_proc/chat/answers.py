"""Read the answers to a chat: whole, or as a stream of parsed events."""

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from aiohttp import web

from http_proc.answer.events import AnswerEvent, ParsedAnswer
from http_proc.answer.parser import AnswerParser
from http_proc.chat.prepare import AnswerReader, PreparedChat
from http_proc.chat.reasoning_tokens import ReasoningTokens
from http_proc.protocol.errors import ApiError
from http_proc.request_group import RequestGroup
from http_proc.responses import StreamFraming, record, stream_events
from quadriga.client.types import Completion, StreamChunk
from quadriga.wire.messages.to_client import Accepted


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
    """Return tool_calls where an answer that ended by itself has calls, else the ring's reason."""
    called = has_calls and completion.finish_reason == "stop"
    return "tool_calls" if called else completion.finish_reason


async def collect_chat(
    request: web.Request, group: RequestGroup, prepared: PreparedChat
) -> list[ChatAnswer]:
    """Return every answer, in order. Raise the first error.

    The tokens of the reasoning are counted if the request was submitted as a stream.
    """
    answers: dict[int, _CollectedAnswer] = {}
    while not group.is_done:
        for choice, chunk in await group.next_chunks():
            if choice not in answers:
                (accepted,) = await group.accepted()
                answers[choice] = _CollectedAnswer(prepared.reader.parser(accepted.prompt_end))
            answers[choice].add(chunk)
            if chunk.completion is not None:
                record(request, group, chunk.completion)
    return [answers[choice].answer(prepared.reader) for choice in sorted(answers)]


class _CollectedAnswer:
    """The chunks of one answer so far."""

    def __init__(self, parser: AnswerParser) -> None:
        self._parser = parser
        self._events: list[AnswerEvent] = []
        self._reasoning = ReasoningTokens()
        self._completion: Completion | None = None

    def add(self, chunk: StreamChunk) -> None:
        """Add the next chunk."""
        events = self._parser.push(chunk.text) if chunk.text else []
        if chunk.completion is not None:
            events += self._parser.finish()
            self._completion = chunk.completion
        self._reasoning.push(events, len(chunk.token_ids))
        self._events += events

    def answer(self, reader: AnswerReader) -> ChatAnswer:
        """Return the answer, which is complete."""
        assert self._completion is not None
        parsed = ParsedAnswer()
        parsed.add(self._events)
        is_counted = reader.separates_reasoning and self._reasoning.is_exact
        count = self._reasoning.count if is_counted else None
        return ChatAnswer(parsed, self._completion, self._events, count)


async def read_chat(
    group: RequestGroup, prepared: PreparedChat, on_completion: Callable[[Completion], None]
) -> AsyncIterator[tuple[list[AnswerEvent], StreamChunk]]:
    """Yield the chunks of a chat with one answer, each with the events that its text has.

    Args:
        group: has the chat as its only request.
        prepared: the chat.
        on_completion: takes the completion before its chunk is yielded.

    Raises:
        QuadrigaError: the request has failed.
    """
    parser: AnswerParser | None = None
    while not group.is_done:
        for _, chunk in await group.next_chunks():
            if parser is None:
                (accepted,) = await group.accepted()
                parser = prepared.reader.parser(accepted.prompt_end)
            events = parser.push(chunk.text) if chunk.text else []
            if chunk.completion is not None:
                on_completion(chunk.completion)
                events += parser.finish()
            yield events, chunk


class ChatRenderer(Protocol):
    """Format the answers to a chat as the events of an API's stream.

    Attributes:
        framing: how the events are sent.
    """

    framing: StreamFraming

    def start(self, num_prompt_tokens: int) -> bytes:
        """Return the events that come before all others."""

    def render(self, choice: int, events: list[AnswerEvent], chunk: StreamChunk) -> bytes:
        """Return the events of a chunk; `events` is what the parser read from its text.

        The last chunk of a choice has `completion`; the parser is then at its end.
        """

    def finish(self) -> bytes:
        """Return the events that follow the last chunk of all choices."""

    def error(self, error: ApiError) -> bytes:
        """Return the events that end the stream with an error."""


async def stream_chat(
    request: web.Request, group: RequestGroup, prepared: PreparedChat, renderer: ChatRenderer
) -> web.StreamResponse:
    """Send the answers as a stream of parsed events."""
    parsing = ParsingRenderer(renderer, prepared.reader)
    return await stream_events(request, group, parsing, prepared.names)


class ParsingRenderer:
    """A Renderer that parses the answers and gives the events to a ChatRenderer."""

    def __init__(self, renderer: ChatRenderer, reader: AnswerReader) -> None:
        self.framing = renderer.framing
        self._renderer = renderer
        self._reader = reader
        self._prompt_end = ""
        self._parsers: dict[int, AnswerParser] = {}

    def start(self, accepted: Sequence[Accepted]) -> bytes:
        """Return the first events of the stream."""
        (of_prompt,) = accepted
        self._prompt_end = of_prompt.prompt_end
        return self._renderer.start(of_prompt.num_prompt_tokens)

    def render(self, choice: int, chunk: StreamChunk) -> bytes:
        """Return the events of a chunk."""
        parser = self._parsers.get(choice)
        if parser is None:
            parser = self._parsers[choice] = self._reader.parser(self._prompt_end)
        events = parser.push(chunk.text) if chunk.text else []
        if chunk.completion is not None:
            events += parser.finish()
        return self._renderer.render(choice, events, chunk)

    def finish(self) -> bytes:
        """Return the last events of the stream."""
        return self._renderer.finish()

    def error(self, error: ApiError) -> bytes:
        """Return the events that end the stream with an error."""
        return self._renderer.error(error)
