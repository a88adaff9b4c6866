"""POST /api/chat and POST /api/generate, and the table of Ollama's endpoints.

First the answers: one body, or a line of JSON for each piece.
"""

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
from http_proc.answer.parser import AnswerParser, ToolSchemas
from http_proc.apis import ollama_models
from http_proc.apis.ollama_models import (
    OllamaAnswer,
    OllamaAnswerMessage,
    OllamaCall,
    OllamaCalledFunction,
    OllamaChatAnswer,
    OllamaError,
    OllamaGenerateAnswer,
    check_ollama_model,
    error_body,
    ollama_logprobs,
    rfc3339,
)
from http_proc.apis.ollama_requests import (
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaMessage,
    OllamaShowRequest,
    length_options,
    ollama_chat,
    ollama_reasoning,
    ollama_sampling,
    with_known_options,
    without_images,
)
from http_proc.core.call import Call
from http_proc.core.errors import ApiError, invalid
from http_proc.core.gateway import Gateway
from http_proc.core.streaming import JSON_LINES, EventSink
from http_proc.generation.chat_answers import ChatAnswer, collect_chat, stream_chat
from http_proc.generation.chat_call import ChatCall
from http_proc.generation.chat_messages import check_counts
from http_proc.generation.prepare import AnswerReader, PreparedChat, prepare_chat
from http_proc.generation.sampling import Sampling, convert, fill_format, fill_params
from http_proc.web.endpoint import LINES, Endpoint, answering, generating
from quadriga.client.types import NO_CHAT_OPTIONS, Chat, Prompt, StreamChunk
from quadriga.clock import now
from quadriga.sampling.params import SamplingParams
from quadriga.server.answer_format import AnswerFormat

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


async def ollama_chat_answer(gateway: Gateway, call: Call, sink: EventSink) -> OllamaAnswer | None:
    """Answer a chat, as a stream unless the request says otherwise."""
    body = await call.parse()
    check_counts(body)
    fields = convert(with_known_options(body), OllamaChatRequest)
    check_ollama_model(gateway, fields.model)
    if not fields.messages:
        return loaded_answer(fields.model, chat_answer)
    info = await gateway.ring_info.static()
    chat = ChatCall(
        messages=ollama_chat(fields.messages),
        sampling=ollama_sampling(fields, info["context_length"]),
        tools=fields.tools,
        reasoning=ollama_reasoning(fields, info),
        continues_message=_is_begun(fields.messages[-1]),
        stream=fields.stream,
    )
    asked = GeneratePrompt(chat.messages, await prepare_chat(gateway, chat))
    return await _answer(gateway, call, sink, fields, asked, chat_answer)


def _is_begun(last: OllamaMessage) -> bool:
    """Return whether the last message is the begin of the answer."""
    return last.role == "assistant" and not last.tool_calls


# The request's name of each field of the ring, beside the options.
NAMES = {"prompt_token_ids": "context", "token_ids": "context"}
# Tokens at the end of a prompt in which the mark of the reasoning is searched for.
NUM_END_TOKENS = 32


@dataclass(frozen=True, slots=True)
class ReaderAfter(AnswerReader):
    """Makes parsers for a prompt that is sent as token ids. text_end: the end of its text."""

    text_end: str

    def parser(self, _: str) -> AnswerParser:
        """Return a parser for one answer."""
        return AnswerReader.parser(self, self.text_end)


@dataclass(frozen=True, slots=True)
class GeneratePrompt:
    """A prompt and how it is answered. ids: its token ids, if the answer has a context."""

    prompt: Prompt
    prepared: PreparedChat
    ids: list[int] | None = None


async def ollama_generate(gateway: Gateway, call: Call, sink: EventSink) -> OllamaAnswer | None:
    """Answer a prompt, as a stream unless the request says otherwise."""
    body = with_known_options(await call.parse())
    fields = convert(body, OllamaGenerateRequest)
    check_ollama_model(gateway, fields.model)
    _check_supported(fields)
    if not fields.prompt and not fields.suffix:
        return loaded_answer(fields.model, generate_answer)
    asked = await _prompt(gateway, fields)
    return await _answer(gateway, call, sink, fields, asked, generate_answer)


async def _answer(
    gateway: Gateway,
    call: Call,
    sink: EventSink,
    fields: OllamaChatRequest | OllamaGenerateRequest,
    asked: GeneratePrompt,
    make: MakeAnswer,
) -> OllamaAnswer | None:
    """Answer a prompt in the form of an endpoint. `make`: makes the bodies."""
    prepared, head = asked.prepared, gateway.head(call, "ollama")
    options = prepared.options | length_options(fields)
    with gateway.open_group(head.id, prepared.names, call.record) as group:
        group.submit(asked.prompt, prepared.params, fields.stream, options)
        if fields.stream:
            lines = OllamaLines(fields.model, make, asked.ids)
            await stream_chat(sink, group, prepared, lines)
            return None
        (answer,) = await collect_chat(group, prepared)
    return whole_answer(fields.model, answer, make, asked.ids)


def _check_supported(fields: OllamaGenerateRequest) -> None:
    without_images(fields.images, "images")
    if fields.template:
        raise invalid(
            "template is not supported: the model's own chat template is used; render the prompt"
            " and send it with raw: true",
            "template",
        )
    for other in ("system", "context"):
        if fields.raw and getattr(fields, other):
            raise invalid(f"raw and {other} are both given: write {other} into the prompt", "raw")
    if fields.suffix and fields.context:
        raise invalid("suffix and context are both given: leave one out", "suffix")


async def _prompt(gateway: Gateway, fields: OllamaGenerateRequest) -> GeneratePrompt:
    """Return the prompt as a chat, as it is, with a suffix, or after a context."""
    info = await gateway.ring_info.static()
    sampling = ollama_sampling(fields, info["context_length"])
    if fields.suffix:
        known = fill_format(info, gateway.model, "suffix")
        filling = Sampling(fill_params(sampling.params, known), sampling.names)
        return _plain(known.prompt(fields.prompt, fields.suffix), filling)
    if fields.raw or not info["chat"]:
        if fields.system:
            raise _no_template(gateway, "system")
        return await _with_context(gateway, fields, _plain(fields.prompt, sampling))
    turns: Chat = [{"role": "system", "content": fields.system}] if fields.system else []
    turns.append({"role": "user", "content": fields.prompt})
    call = ChatCall(
        messages=turns,
        sampling=sampling,
        reasoning=ollama_reasoning(fields, info),
        names={"messages": "prompt"},
    )
    prepared = await prepare_chat(gateway, call)
    return await _with_context(gateway, fields, GeneratePrompt(turns, prepared))


def _no_template(gateway: Gateway, field: str) -> ApiError:
    return invalid(
        f"{field} needs a chat template, and {gateway.model} has none: write it into the prompt",
        field,
    )


def _plain(prompt: str, sampling: Sampling) -> GeneratePrompt:
    """Return a prompt whose answer is text alone."""
    reader = AnswerReader(AnswerFormat(), ToolSchemas(), None, False, False, False)
    params: SamplingParams = sampling.params
    return GeneratePrompt(prompt, PreparedChat(params, {}, {**NAMES, **sampling.names}, reader))


async def _with_context(
    gateway: Gateway, fields: OllamaGenerateRequest, asked: GeneratePrompt
) -> GeneratePrompt:
    """Return the prompt as token ids after those of the context, if the request has the field."""
    if fields.context is None:
        return asked
    prepared = asked.prepared
    chat = prepared.options.get("chat", NO_CHAT_OPTIONS)
    own_ids = await gateway.ring.tokenize(asked.prompt, chat)
    ids = [*fields.context, *own_ids]
    text_end = await gateway.ring.detokenize(own_ids[-NUM_END_TOKENS:], False)
    reader = prepared.reader
    after = ReaderAfter(
        reader.answer_format,
        reader.tools,
        reader.max_calls,
        reader.parses_reasoning,
        reader.ends_at_repeat,
        reader.takes_unmarked,
        text_end,
    )
    return GeneratePrompt(
        ids, PreparedChat(prepared.params, {}, {**prepared.names, **NAMES}, after), ids
    )


_ERRORS: dict[str, Any] = {"error_body": error_body, "error": OllamaError}

OLLAMA_ENDPOINTS = [
    generating("/api/chat", ollama_chat_answer, "Answer a chat, in Ollama's format",
               OllamaChatRequest, OllamaChatAnswer, stream_type=LINES, **_ERRORS),
    generating("/api/generate", ollama_generate, "Answer a prompt, in Ollama's format",
               OllamaGenerateRequest, OllamaGenerateAnswer, stream_type=LINES, **_ERRORS),
    answering("/api/show", ollama_models.show, "Describe the model, in Ollama's format",
              OllamaShowRequest, ollama_models.OllamaShowAnswer, **_ERRORS),
    Endpoint("/api/tags", ollama_models.tags, "The model that is served, in Ollama's format",
             ollama_models.OllamaModelList, **_ERRORS),
    Endpoint("/api/ps", ollama_models.ps, "The model that is loaded, in Ollama's format",
             ollama_models.OllamaLoadedModels, **_ERRORS),
    Endpoint("/api/version", ollama_models.version, "The version of Ollama whose API this is",
             ollama_models.OllamaVersion, **_ERRORS),
    *(Endpoint(f"/api/{name}", ollama_models.absent, "Not offered", None,
               method="delete" if name == "delete" else "post", **_ERRORS)
      for name in ollama_models.ABSENT),
]  # fmt: skip
