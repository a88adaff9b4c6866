"""The handler of POST /api/generate."""

from dataclasses import dataclass

from aiohttp import web

from http_proc.answer.parser import AnswerParser, ToolSchemas
from http_proc.apis.ollama.lines import OllamaLines, generate_answer, loaded_answer, whole_answer
from http_proc.apis.ollama.models import check_ollama_model
from http_proc.apis.ollama.requests import OllamaGenerateRequest
from http_proc.apis.ollama.sampling import (
    length_options,
    ollama_reasoning,
    ollama_sampling,
    with_known_options,
    without_images,
)
from http_proc.chat.answers import collect_chat, stream_chat
from http_proc.chat.call import ChatCall
from http_proc.chat.prepare import AnswerReader, PreparedChat, prepare_chat
from http_proc.endpoints.request_body import convert, read_object
from http_proc.gateway import GATEWAY, Gateway
from http_proc.protocol.errors import ApiError, invalid
from http_proc.protocol.filling import fill_format, fill_params
from http_proc.protocol.sampling import Sampling
from http_proc.responses import json_response
from quadriga.answer_format import AnswerFormat
from quadriga.client.types import NO_CHAT_OPTIONS, Chat, Prompt
from quadriga.sampling.params import SamplingParams

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


async def ollama_generate(request: web.Request) -> web.StreamResponse:
    """Answer a prompt, as a stream unless the request says otherwise."""
    gateway = request.app[GATEWAY]
    body = with_known_options(await read_object(request))
    fields = convert(body, OllamaGenerateRequest)
    check_ollama_model(gateway, fields.model)
    _check_supported(fields)
    if not fields.prompt and not fields.suffix:
        return json_response(loaded_answer(fields.model, generate_answer))
    asked = await _prompt(gateway, fields)
    prepared = asked.prepared
    head = gateway.head(request, "ollama")
    options = prepared.options | length_options(fields)
    with gateway.open_group(head.id, prepared.names) as group:
        group.submit(asked.prompt, prepared.params, fields.stream, options)
        if fields.stream:
            lines = OllamaLines(fields.model, generate_answer, asked.ids)
            return await stream_chat(request, group, prepared, lines)
        (answer,) = await collect_chat(request, group, prepared)
    return json_response(whole_answer(fields.model, answer, generate_answer, asked.ids))


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
