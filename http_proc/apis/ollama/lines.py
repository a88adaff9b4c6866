"""Format parsed answers in Ollama's form: one body, or a line of JSON for each piece."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from http_proc.answer.events import (
    AnswerEvent,
    ArgumentsDelta,
    CallBegin,
    CallEnd,
    ParsedCall,
    ReasoningDelta,
    TextDelta,
)
from http_proc.apis.ollama.answers import (
    OllamaAnswer,
    OllamaAnswerMessage,
    OllamaCall,
    OllamaCalledFunction,
    OllamaChatAnswer,
    OllamaGenerateAnswer,
    error_body,
    ollama_logprobs,
    rfc3339,
)
from http_proc.chat.answers import ChatAnswer
from http_proc.protocol.errors import ApiError
from http_proc.responses import JSON_LINES
from quadriga.client.types import StreamChunk
from quadriga.clock import now

_encode = msgspec.json.encode


@dataclass(slots=True)
class OllamaPiece:
    """A piece of an answer. calls: complete calls, whose arguments are JSON."""

    text: str = ""
    thinking: str = ""
    calls: list[OllamaCall] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        """Whether the piece adds nothing."""
        return not (self.text or self.thinking or self.calls)


# Make a body of the model's name, the time and a piece.
MakeAnswer = Callable[[str, str, OllamaPiece], OllamaAnswer]


def chat_answer(model: str, created_at: str, piece: OllamaPiece) -> OllamaAnswer:
    """Return a body of /api/chat."""
    message = OllamaAnswerMessage(
        role="assistant", content=piece.text, thinking=piece.thinking, tool_calls=piece.calls
    )
    return OllamaChatAnswer(model=model, created_at=created_at, message=message)


def generate_answer(model: str, created_at: str, piece: OllamaPiece) -> OllamaAnswer:
    """Return a body of /api/generate."""
    return OllamaGenerateAnswer(
        model=model,
        created_at=created_at,
        response=piece.text,
        thinking=piece.thinking or msgspec.UNSET,
    )


def loaded_answer(model: str, make: MakeAnswer) -> OllamaAnswer:
    """Return the body of a request without input, by which clients load a model."""
    body = make(model, rfc3339(now()), OllamaPiece())
    body.done, body.done_reason = True, "load"
    return body


class PieceReader:
    """Collect the events of an answer into pieces, in which every call is whole."""

    def __init__(self) -> None:
        self._call: ParsedCall | None = None
        self._num_calls = 0

    def read(self, events: Iterable[AnswerEvent]) -> OllamaPiece:
        """Return what the next events add."""
        piece = OllamaPiece()
        for event in events:
            match event:
                case TextDelta():
                    piece.text += event.text
                case ReasoningDelta():
                    piece.thinking += event.text
                case CallBegin():
                    self._call = ParsedCall(event.id, event.name)
                case ArgumentsDelta() if self._call is not None:
                    self._call.arguments += event.text
                case CallEnd() if self._call is not None:
                    self._call.is_complete = True
                    self.add(piece, self._call)
                    self._call = None
        return piece

    def rest(self) -> OllamaPiece:
        """Return the call that was cut off, if there is one."""
        piece, call = OllamaPiece(), self._call
        if call is not None:
            self.add(piece, call)
        return piece

    def add(self, piece: OllamaPiece, call: ParsedCall) -> None:
        """Add a call to a piece; as text if it was cut off or its arguments are no JSON object."""
        arguments = _arguments(call)
        if arguments is None:
            name = _encode(call.name).decode()
            piece.text += f'{{"name": {name}, "arguments": {call.arguments}'
            return
        function = OllamaCalledFunction(self._num_calls, call.name, arguments)
        piece.calls.append(OllamaCall(call.id, function))
        self._num_calls += 1


def _arguments(call: ParsedCall) -> dict[str, Any] | None:
    """Return the arguments of a call; None if it was cut off or they are no JSON object."""
    if not call.is_complete:
        return None
    try:
        return msgspec.json.decode(call.arguments or "{}", type=dict[str, Any])
    except msgspec.DecodeError:
        return None


def whole_answer(
    model: str, answer: ChatAnswer, make: MakeAnswer, prompt_ids: list[int] | None = None
) -> OllamaAnswer:
    """Return the body of a whole answer. prompt_ids: for the field context of /api/generate."""
    parsed, completion = answer.parsed, answer.completion
    reader, piece = PieceReader(), OllamaPiece(parsed.text, parsed.reasoning)
    for call in parsed.calls:
        reader.add(piece, call)
    body = make(model, rfc3339(now()), piece)
    body.end(completion, prompt_ids)
    if completion.logprobs is not None:
        body.logprobs = ollama_logprobs(completion.logprobs)
    return body


class OllamaLines:
    """ChatRenderer of Ollama's streams: a line for each piece, and a last one with the numbers.

    Args:
        model: the name that the request has.
        make: makes the body of a piece.
        prompt_ids: token ids of the prompt, for the field context of /api/generate.
    """

    framing = JSON_LINES

    def __init__(self, model: str, make: MakeAnswer, prompt_ids: list[int] | None = None) -> None:
        self._model = model
        self._make = make
        self._prompt_ids = prompt_ids
        self._reader = PieceReader()

    def start(self, _: int) -> bytes:
        """Return nothing: the first line is that of the first piece."""
        return b""

    def render(self, _: int, events: list[AnswerEvent], chunk: StreamChunk) -> bytes:
        """Return the lines of a chunk."""
        pieces, lines = [self._reader.read(events)], []
        if chunk.completion is not None:
            pieces.append(self._reader.rest())
        for piece in pieces:
            if not piece.is_empty:
                lines.append(self._body(piece))
        if chunk.logprobs:
            lines = lines or [self._body(OllamaPiece())]
            lines[0].logprobs = ollama_logprobs(chunk.logprobs)
        if chunk.completion is not None:
            last = self._body(OllamaPiece())
            last.end(chunk.completion, self._prompt_ids)
            lines.append(last)
        return b"".join(_encode(line) + b"\n" for line in lines)

    def finish(self) -> bytes:
        """Return nothing: the line with the numbers is the last."""
        return b""

    def error(self, error: ApiError) -> bytes:
        """Return the line of an error."""
        return error_body(error) + b"\n"

    def _body(self, piece: OllamaPiece) -> OllamaAnswer:
        return self._make(self._model, rfc3339(now()), piece)
